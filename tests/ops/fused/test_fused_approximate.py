"""Approximate ops, codes and draws by kernels: what PyTorch's functions give, in the same bytes, and the same draws."""

import types
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from hf_memsave import WTACRS, MemSaveConfig, patch
from hf_memsave.count.kept import measure_kept
from hf_memsave.ops.fused import kernels as kernels_file
from hf_memsave.ops.fused.codes import FUSED_CODERS
from hf_memsave.ops.fused.codes import FUSED_DRAWING as BY_KERNELS
from hf_memsave.ops.fused.kernels import kernels
from hf_memsave.ops.sampled.estimators import EAGER
from hf_memsave.tape.bits import CODERS
from hf_memsave.tape.quantize import FORMATS
from support.kernels import distance, interpreted, rounding  # noqa: F401
from support.kernels import step as one_step
from support.steps import patched
from support.zoo import Size, batch_for, build

pytestmark = interpreted
SIZE = Size(hidden=32, heads=2, layers=2, batch=2, seq=24)
OTHERS = dict(norm="stock", activation="stock", dropout="stock", attention="stock")
#: A way to keep less -> its configuration, the kernels it runs, and a model where it has an effect.
WAYS = {
    "invert": (dict(activation="invert"), {"inverted_forward", "inverted_backward"}, "bert"),
    "precision_bit": (dict(activation="precision_bit"), {"inverted_forward", "inverted_backward"}, "bert"),
    "few_bit": (dict(activation="few_bit", few_bits=3), {"few_bit_codes", "few_bit_backward"}, "gpt2-frozen"),
    "output": (dict(norm="output"), {f"output_norm_{which}" for which in ("forward", "again", "backward")}, "bert"),
    "output of RMSNorms": (
        dict(norm="output"), {f"output_norm_{which}" for which in ("forward", "again", "backward")}, "llama"
    ),
    "sampled": (
        dict(linear=WTACRS(targets=("0", "1"))), {"row_norms", "probabilities", "draw", "gather_rows"}, "bert"
    ),
    "sampled attention": (
        dict(linear=WTACRS(targets=("0", "1"), attention=True)), {"probabilities", "draw"}, "bert-eager"
    ),
    "bits": (dict(dropout="mask"), {"pack_bits", "unpack_bits"}, "bert-dropout"),
}  # fmt: skip


@pytest.fixture
def calls(monkeypatch):
    """How often each kernel's function was called."""
    found = Counter()

    def counting(name):
        stock = getattr(kernels(), name)

        def call(*args, **options):
            found[name] += 1
            return stock(*args, **options)

        return call

    for name in kernels().__all__:
        if isinstance(getattr(kernels(), name), types.FunctionType):
            monkeypatch.setattr(kernels(), name, counting(name))
    return found


def make(name, device, dtype=torch.float32):
    family, _, kind = name.partition("-")
    model = build(family, SIZE, dtype, dropout=0.1 if kind == "dropout" else 0.0)
    if kind == "eager":
        model.set_attn_implementation("eager")
    if kind == "frozen":  # all but biases and norms, so that no linear wants the activation's output
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() < 2)
    return model.to(device)


def step(name, device, dtype=torch.float32, config=None):
    model = make(name, device, dtype)
    if config is not None:
        patch(model, config)
    batch = batch_for(model, SIZE)
    return measure_kept(model, batch).total, one_step(model, 7, SIZE)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_and_bytes_are_those_of_the_torch_backend(way, device, calls):
    config, wanted, name = WAYS[way]
    config = MemSaveConfig(**OTHERS | config)
    bytes_of_torch, by_torch = step(name, device, config=config)
    assert not calls
    bytes_here, here = step(name, device, config=replace(config, backend="triton"))
    assert calls.keys() >= wanted
    assert bytes_here <= bytes_of_torch
    _, exact = step(name, device)
    apart = distance(by_torch, exact)
    if "sampled" in way:  # rows of a norm's output are as long but for rounding, which decides who wins
        assert 0.7 * apart < distance(here, exact) < 1.4 * apart
    else:
        assert distance(here, by_torch) <= max(1e-6, 0.01 * apart)


def test_the_input_of_a_fused_linear_is_stored_in_as_few_bytes_as_of_stocks(device):
    """What is embedded is fp32 and has no record: its conversion for the product is what has to be kept."""
    ids, kept = torch.arange(1024, device=device).view(4, 256) % 100, []
    for backend in ("torch", "triton"):
        model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 64)).to(device)
        patch(model, MemSaveConfig(storage="int8", backend=backend))

        def forward(x, model=model):
            with torch.autocast(device.type, torch.bfloat16):
                return model(x).float().sum()

        kept.append(measure_kept(model, {"x": ids}, forward).total)
    assert kept[1] <= 1.01 * kept[0] < 0.6 * ids.numel() * 64 * 2


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_stored_is_coded_by_kernels_in_as_many_bytes(kind, device, calls):
    config = MemSaveConfig(**OTHERS, storage=kind)
    bytes_of_torch, by_torch = step("bert", device, config=config)
    assert not calls
    bytes_here, here = step("bert", device, config=replace(config, backend="triton"))
    assert calls["decode"] and calls["encode"] == 2 * calls["decode"]  # as what is measured has no backward
    assert bytes_here == bytes_of_torch
    _, exact = step("bert", device)
    assert distance(here, exact) <= 1.5 * distance(by_torch, exact)  # other draws of the rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", FORMATS)
def test_either_reads_what_the_other_coded(kind, dtype, device):
    form, x = FORMATS[kind], torch.randn(1000, device=device).to(dtype)
    masked = x.clone()
    masked[5:300:3], masked[7] = torch.finfo(dtype).min, torch.nan
    masked[300:700:7], masked[700::5] = -torch.inf, -1e4
    generator = torch.Generator(device).manual_seed(0)
    eager, is_near = CODERS, (masked.abs() < 100).nonzero().flatten()
    for write, read in ((eager, FUSED_CODERS), (FUSED_CODERS, eager), (FUSED_CODERS, FUSED_CODERS)):
        codes = write.encode(x, form, generator)
        found = read.decode(*codes, form, x.numel(), dtype)
        assert found.dtype is dtype
        steps = codes[1][:, 1:].double().expand(-1, form.block).reshape(-1)[: x.numel()]
        assert ((found.double() - x.double()).abs() <= 1.01 * steps + torch.finfo(dtype).eps * x.abs()).all()
        codes = write.encode(masked, form, generator)
        assert (codes[1][:, 1] < 0).all(), "there is a block that is not mixed"
        for decode in (read.decode, eager.decode):
            found = decode(*codes, form, x.numel(), dtype)
            assert torch.equal(found.isnan(), masked.isnan()) and torch.equal(found.isinf(), masked.isinf())
            far = (found.double() / masked.double())[masked.isfinite() & (masked.abs() > 100)]
            assert (far - 1).abs().max() <= 0.07  # 4 bits have M in bf16 at random, or a number 1/16 nearer
            assert (found - x)[is_near].abs().max() < {8: 0.07, 4: 1.1}[form.bits]
    again = [FUSED_CODERS.encode(x, form, generator.manual_seed(seed))[0] for seed in (0, 0, 1)]
    assert torch.equal(*again[:2]) and not torch.equal(*again[1:])
    flags = torch.rand(1001, device=device) > 0.5
    assert torch.equal(eager.pack_bits(flags), FUSED_CODERS.pack_bits(flags))
    assert torch.equal(FUSED_CODERS.unpack_bits(eager.pack_bits(flags), 1001), flags)


@pytest.mark.parametrize("estimator", ["wta", "crs", "topk"])
@pytest.mark.parametrize("rows", [(), (3,)], ids=str)
def test_draws_are_the_same(rows, estimator, device):
    torch.manual_seed(0)
    x, u = torch.randn(*rows, 50, 8, device=device).exp(), torch.rand(*rows, 15, device=device, dtype=torch.float64)
    predicted, allowed, found = torch.rand(50, device=device), torch.rand(50, device=device) > 0.2, []
    for drawing in (EAGER, BY_KERNELS):
        p = drawing.probabilities(drawing.row_norms(x), predicted, allowed)
        found.append([p, *drawing.draw(estimator, p, 15, u)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


def test_without_a_tape_or_in_float64_pytorch_computes(device, calls):
    config = MemSaveConfig(**OTHERS | dict(activation="invert", norm="output", backend="triton"))
    model = patched(make("bert", device), config)
    model.double()
    x = torch.randn(2, 24, 32, device=device, dtype=torch.float64, requires_grad=True)
    model.bert.encoder.layer[0](x)[0].sum().backward()
    assert not calls


def test_a_backward_without_kernels_reads_their_codes(device, monkeypatch):
    """Forward decides for backward, but what the tape keeps is decoded wherever it can be."""
    config = MemSaveConfig(**OTHERS, storage="int8", backend="triton")
    model = patched(make("bert", device), config)
    loss = model(**batch_for(model, SIZE)).loss
    monkeypatch.setattr(kernels_file, "is_installed", lambda: False)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_other_versions_of_the_kernels_are_left_alone(monkeypatch, tmp_path):
    """Installed under the same name, they keep it."""
    (tmp_path / "memsave_kernels.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(kernels_file.sys.modules, "memsave_kernels")
    loaded = kernels_file.kernels.__wrapped__()
    assert loaded.__name__ == "hf_memsave_kernels" and loaded.ACTIVATIONS
    monkeypatch.delitem(kernels_file.sys.modules, "hf_memsave_kernels")
