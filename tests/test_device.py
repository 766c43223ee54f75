"""What a device does."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_memsave import device as ask
from hf_memsave.device import add_product, wide_product
from hf_memsave.measure.fake_device import STATE_BYTES, fake_device
from hf_memsave.tape.autocast import widens
from hf_memsave.tape.dropout import scale_of


@pytest.mark.parametrize("wrong", [False, True])
def test_dropouts_scale_is_that_of_the_fused_kernel_for_every_p(wrong):
    """CUDA's kernel computes in fp32, but in fp64 for fp64: it is given 1 - p, and multiplies with 1 over it."""
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    mask, differ = (np.arange(64) % 3 > 0).astype(np.float32), []
    for p in (step / 1000 for step in range(1, 1000)):
        scale = np.float32(1.0 / (1.0 - p) if wrong else scale_of(p))
        if (x * scale * mask != x * mask * (np.float32(1.0) / np.float32(1.0 - p))).any():
            differ.append(p)
    assert len(differ) == (226 if wrong else 0)
    assert scale_of(0.1, torch.float64) == 1 / 0.9 != scale_of(0.1) == scale_of(0.1, torch.bfloat16)


def test_a_cpu_does_as_cpus_do():
    x = torch.ones(8)
    assert not ask.fuses_dropout(x)
    assert not widens(x, "layer_norm")
    assert ask.has_numbers(x)
    assert ask.default_generator(x.device) is torch.default_generator
    assert ask.current_stream(x.device) is None
    assert not ask.is_capturing(x.device)
    assert not ask.has_numbers(x.to("meta"))
    with torch.autocast("cpu", torch.bfloat16):
        assert not widens(x, "layer_norm")


@pytest.mark.parametrize("error", [None, TypeError("out_dtype"), RuntimeError("not here")], ids=str)
def test_wide_products_are_tried_where_a_device_may_have_them(monkeypatch, error):
    def mm(a, b, out_dtype):
        if error is not None:
            raise error
        return (a @ b).to(out_dtype)

    monkeypatch.setattr(ask, "_AS_CUDA", frozenset({"cpu"}))
    monkeypatch.setattr(torch, "mm", mm)
    ask._gives_wide_products.cache_clear()
    assert ask.has_wide_products(torch.ones(2, 2, dtype=torch.bfloat16)) == (error is None)
    ask._gives_wide_products.cache_clear()


@pytest.mark.parametrize("faulty", [None, "raises", "ignores the sum"])
def test_that_products_add_is_tried_with_numbers(monkeypatch, faulty):
    def addmm(total, a, b, out_dtype, out):
        if faulty == "raises":
            raise RuntimeError
        return out.copy_(torch.mm(a, b) + (0 if faulty else total))

    x = torch.ones(2, 2, dtype=torch.bfloat16)
    monkeypatch.setattr(ask, "_AS_CUDA", frozenset({"cpu"}))
    monkeypatch.setattr(ask, "_adds", {})
    monkeypatch.setattr(torch, "addmm", addmm)
    with monkeypatch.context() as capture:
        capture.setattr(ask, "is_capturing", lambda device: True)
        assert not ask.adds_wide_products(x)
    with FakeTensorMode() as fakes:
        assert not ask.adds_wide_products(fakes.from_tensor(x))
    assert ask._adds == {}, "what could not be tried is not known"
    for _ in range(2):
        assert ask.adds_wide_products(x) == (faulty is None)
        monkeypatch.setattr(ask, "is_capturing", lambda device: True)  # once tried, it is known


@pytest.mark.parametrize(("hip", "elements"), [(None, 4), ("6.4", 16)])
@pytest.mark.parametrize("offset", [0, 1, 4, 8, 12, 16, 20, 32])
def test_alignment_is_that_of_the_first_element_and_as_wide_as_a_devices_loads(monkeypatch, hip, elements, offset):
    monkeypatch.setattr(torch.version, "hip", hip)
    aligned = torch.empty(80)
    aligned = aligned[-(aligned.data_ptr() // 4) % 16 :]
    assert ask.is_aligned(aligned[offset:]) == (offset % elements == 0)


def test_the_stand_in_gives_products_in_fp32_and_adds_them():
    with fake_device() as device:
        x, total = torch.ones(2, 2, dtype=torch.bfloat16, device=device), torch.ones(2, 2, device=device)
        assert ask.has_wide_products(x) and ask.adds_wide_products(x)
        assert wide_product(x, x, torch.float32).dtype == torch.float32
        assert add_product(total, x, x) is total


def test_the_stand_in_does_as_cuda_does():
    with fake_device() as device:
        x = torch.ones(64, device=device)
        assert ask.fuses_dropout(x)
        assert not ask.has_numbers(x)
        assert [ask.is_aligned(x[n:]) for n in (0, 1, 4)] == [True, False, True]
        assert ask.default_generator(device).get_state().nbytes == STATE_BYTES
        assert torch.rand(3, generator=ask.new_generator(device, 1), device=device).shape == (3,)
        assert not widens(x, "layer_norm")
        with torch.autocast(device.type, torch.bfloat16):
            assert widens(x, "layer_norm")
            assert not widens(x, "gelu")


@pytest.mark.long
def test_where_it_cannot_be_the_tests_that_open_the_stand_in_are_skipped():
    code = """
import sys, pytest, torch
sys.path.insert(0, "tests")
import support.zoo, support.kernels, support.launches, support.lora
torch.cuda.is_available = lambda: True
sys.exit(pytest.main(sys.argv[1:]))
"""
    files = [f"tests/ops/{name}.py" for name in ("fused/test_fused", "fused/test_fused_launches")]
    command = [sys.executable, "-c", code, "-p", "no:cacheprovider", "-rs", "-k", "on_a_gpu or stocks_launches", *files]
    environment = {name: value for name, value in os.environ.items() if name != "CI"}  # where a skip is a failure
    where = dict(cwd=Path(__file__).parents[1], env=environment)
    done = subprocess.run(command, **where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" in done.stdout and "passed" not in done.stdout, done.stdout
    assert "needs a process without GPUs" in done.stdout


@pytest.mark.parametrize(("groups", "limits", "expected"), [
    ("0::/", {"memory.max": "max"}, None),
    ("0::/job/step", {"job/memory.max": 10**6, "job/step/memory.max": "max"}, 10**6),
    ("0::/not/here", {"memory.max": 10**6}, 10**6),  # in a container the path is that of the host
    ("5:cpu:/job\n4:memory:/job", {"memory/job/memory.limit_in_bytes": 10**6, "cpu/memory.max": 1}, 10**6),
])  # fmt: skip
def test_a_control_group_limits_what_is_free(groups, limits, expected, tmp_path, monkeypatch):
    here = {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": limit for name, limit in limits.items()}}
    for name, content in here.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(str(content))
    monkeypatch.setattr(ask, "Path", lambda root, *parts: Path(tmp_path, root[1:], *parts))
    monkeypatch.setattr(ask.psutil, "virtual_memory", lambda: SimpleNamespace(available=10**9, total=10**10))
    monkeypatch.setattr(ask.psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=1000)))
    ask._limits.cache_clear()
    try:
        assert ask.free_main_memory() == (10**9 if expected is None else expected - 1000)
    finally:
        ask._limits.cache_clear()
