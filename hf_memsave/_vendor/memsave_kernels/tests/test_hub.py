"""The package as kernel-builder builds it and ``kernels`` loads it: its layers in tiny models, and what comes along."""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from jinja2 import Environment, StrictUndefined
from torch import nn

kernels = pytest.importorskip("kernels")
from kernels import LocalLayerRepository, Mode, kernelize, replace_kernel_forward_from_hub  # noqa: E402
from kernels._rust import Build  # noqa: E402
from kernels.cli import benchmark  # noqa: E402
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402
from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: E402

import memsave_kernels  # noqa: E402
from cases.case import DEVICE, no_worse  # noqa: E402

ROOT = Path(__file__).parents[1]
TRAINED = Mode.TRAINING | Mode.TORCH_COMPILE
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "attn_implementation": "sdpa",
}  # fmt: skip
#: Model -> its class, its configuration, and the slot and the layer of its parts: Transformers itself marks the slots
#: only where it likes the version of ``kernels``, of MLPs and the loss none at all.
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES), {"norm": ("RMSNorm", "RMSNorm"), "mlp": ("SwiGLUMLP",) * 2}),
    "gemma": (
        GemmaForCausalLM, GemmaConfig(**SIZES),
        {"norm": ("RMSNormZeroCentered", "GemmaRMSNorm"), "mlp": ("GeGLUMLP",) * 2},
    ),
}  # fmt: skip
LOSS = "ForCausalLMLoss"
#: Kernel-builder writes a file _ops.py of this kind into the package, and ops have to be in its namespace.
OPS = "import torch\n_OPS_NAME = {name!r}\nops = getattr(torch.ops, _OPS_NAME)\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """A copy of the project, built as kernel-builder does it, but for the machine that this test runs on."""
    folder = tmp_path_factory.mktemp("hub") / "memsave-kernels"
    left_out = shutil.ignore_patterns("__pycache__", ".*", "tests", "aot")
    shutil.copytree(ROOT, folder, ignore=left_out)
    backend = kernels.backends._backend().name
    name, variant = f"_memsave_kernels_{backend}_0a1b2c3", folder / "build" / f"torch-{backend}"
    shutil.copytree(folder / "torch-ext" / "memsave_kernels", variant)
    assert not (variant / "_ops.py").exists()  # it would not write over one
    (variant / "_ops.py").write_text(OPS.format(name=name))
    metadata = {"id": name, "name": "memsave-kernels", "version": 1, "license": "apache-2.0", "python-depends": []}
    (variant / "metadata.json").write_text(json.dumps(metadata | {"backend": {"type": backend}}))
    return folder


@pytest.fixture
def layers(repository):
    return kernels.get_local_kernel(repository).layers


def swap(model: nn.Module, slots: dict[str, str], repository: Path, mode: Mode) -> None:
    """Give the modules of the slots our layers, which are registered as Transformers does it."""
    repositories = {slot: LocalLayerRepository(repository, layer_name=layer) for slot, layer in slots.items()}
    mapping = {slot: {DEVICE: {TRAINED: one}} for slot, one in repositories.items()}
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=mode, device=DEVICE, use_fallback=False)


def parts(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The norms, the MLPs and the loss."""
    norms, mlps = [model.model.norm], []
    for layer in model.model.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
        mlps.append(layer.mlp)
    return {"norm": norms, "mlp": mlps, "loss": [model._loss_function]}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    cls, config, _ = MODELS[name]
    model = cls(config).to(DEVICE)
    for p in model.parameters():  # norms too
        p.data += 0.1 * torch.randn_like(p)
    model._loss_function = kernels.use_kernel_forward_from_hub(LOSS)(ForCausalLMLoss)
    return model.train()


def swapped(name: str, repository: Path, mode: Mode) -> nn.Module:
    model, (_, _, of_parts) = built(name), MODELS[name]
    for part, (slot, _) in of_parts.items():
        replace_kernel_forward_from_hub(type(parts(model)[part][0]), slot)
    swap(model, {**dict(of_parts.values()), LOSS: LOSS}, repository, mode)
    layers = kernels.get_local_kernel(repository).layers
    for part, (_, layer) in (of_parts | {"loss": (LOSS, LOSS)}).items():
        assert all(one.forward.__func__ is getattr(layers, layer).forward for one in parts(model)[part])
    return model


def widened(name: str) -> nn.Module:
    """The stock model in float64, where it computes in float32 whatever its dtype."""
    model = built(name).double()
    for norm in parts(model)["norm"]:
        eps, offset = getattr(norm, "variance_epsilon", None) or norm.eps, float(name == "gemma")
        norm.forward = lambda x, n=norm, e=eps, o=offset: F.rms_norm(x, x.shape[-1:], o + n.weight, e)
    model._loss_function.forward = lambda logits, labels, vocab_size, **_: F.cross_entropy(
        logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1)
    )
    return model


def step(model, call=None) -> dict[str, torch.Tensor]:
    """The loss and the gradients of a step."""
    ids = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    labels = ids.where(ids > 4, -100)
    loss = (model if call is None else call)(input_ids=ids, labels=labels).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


@functools.cache
def expected(name: str) -> tuple[dict, dict]:
    return step(built(name)), step(widened(name))


def check(name: str, found: dict) -> None:
    """Hold a step to the bounds of the kernels' tests, a rounding for each layer: five norms, two MLPs, a loss."""
    eager, exact = expected(name)
    assert found.keys() == exact.keys()
    for key, value in found.items():
        no_worse(key, value, eager[key], exact[key], roundings=8)


@pytest.mark.parametrize("name", MODELS)
def test_swapped_layers_are_no_worse_than_stock(name, repository):
    check(name, step(swapped(name, repository, Mode.TRAINING)))


@pytest.mark.parametrize("name", MODELS)
def test_swapped_layers_are_no_worse_than_stock_when_compiled(name, repository):
    model = swapped(name, repository, TRAINED)
    check(name, step(model, torch.compile(model, backend="aot_eager", fullgraph=True)))


PLANTED = [(name, layer) for name, (_, _, slots) in MODELS.items() for layer in [*dict(slots.values()).values(), LOSS]]


@pytest.mark.parametrize(("name", "layer"), PLANTED)
def test_an_error_of_1_percent_in_a_layer_is_caught(name, layer, repository, layers, monkeypatch):
    cls = getattr(layers, layer)
    forward = cls.forward
    monkeypatch.setattr(cls, "forward", functools.wraps(forward)(lambda *args, **kw: 1.01 * forward(*args, **kw)))
    found = step(swapped(name, repository, Mode.TRAINING))
    with pytest.raises(AssertionError):
        check(name, found)


#: Layer -> the settings that it takes from the module it replaces, and its inputs.
SETTINGS = {
    "RMSNorm": {"variance_epsilon": 1e-6}, "LlamaRMSNorm": {"variance_epsilon": 1e-6}, "GemmaRMSNorm": {"eps": 1e-6},
    "T5RMSNorm": {"variance_epsilon": 1e-6}, "LayerNorm": {"eps": 1e-5}, "Gelu": {"approximate": "tanh"},
    "SiluAndMul": {}, "SwiGLUMLP": {}, "GeGLUMLP": {}, LOSS: {},
}  # fmt: skip


def adopter(layer: type, name: str) -> nn.Module:
    """A module that has all that layers need, and no forward of its own."""
    torch.manual_seed(0)
    fails = functools.wraps(layer.forward)(lambda *args, **kwargs: pytest.fail("it was not replaced"))
    model = type("Adopter", (nn.Module,), {"forward": fails})()
    model.weight, model.bias = (nn.Parameter(torch.randn(8, device=DEVICE)) for _ in range(2))
    model.gate_proj, model.up_proj, model.down_proj = (nn.Linear(8, 8, device=DEVICE) for _ in range(3))
    for key, value in SETTINGS[name].items():
        setattr(model, key, value)
    replace_kernel_forward_from_hub(type(model), name)
    return model


def call(model: nn.Module, name: str, has_logits: bool) -> list[torch.Tensor]:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2)).to(DEVICE).requires_grad_()
    if name == LOSS:
        labels = torch.arange(10, device=DEVICE).reshape(2, 5) % 8
        head = {} if has_logits else {"hidden_states": x, "lm_head_weight": model.up_proj.weight}
        y = model(x if has_logits else None, labels, 8, num_items_in_batch=torch.tensor(3, device=DEVICE), **head)
    else:
        y = model(x)
    return [y, *torch.autograd.grad(y.square().sum(), x)]


@pytest.mark.parametrize(("name", "has_logits"), [*((name, True) for name in SETTINGS), (LOSS, False)])
def test_a_layer_is_compiled_into_one_graph(name, has_logits, repository, layers):
    model = adopter(getattr(layers, name), name)
    swap(model, {name: name}, repository, TRAINED)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for found, plain in zip(call(compiled, name, has_logits), call(model, name, has_logits), strict=True):
        assert torch.equal(found, plain)


def test_every_layer_is_tested_and_says_that_it_can_be_compiled(repository, layers, monkeypatch):
    found = {name for name, one in vars(layers).items() if getattr(one, "__module__", "") == layers.__name__}
    assert found == SETTINGS.keys()
    model = adopter(layers.Gelu, "Gelu")
    monkeypatch.setattr(layers.Gelu, "can_torch_compile", False)
    with pytest.raises(ValueError, match="does not support torch.compile"):
        swap(model, {"Gelu": "Gelu"}, repository, TRAINED)


@pytest.mark.parametrize("has_count", [False, True])
def test_the_loss_without_logits_is_that_of_logits_and_leaves_them(has_count, layers):
    x, head = torch.randn(2, 6, 8, device=DEVICE), torch.randn(11, 8, device=DEVICE)
    labels = torch.tensor([[1, 2, -100, 4, 5, 6], [-100, 10, 9, 8, 7, 6]], device=DEVICE)
    logits, count = x @ head.T, torch.tensor(4, device=DEVICE) if has_count else None
    before, layer = logits.clone(), layers.ForCausalLMLoss()
    stock = ForCausalLMLoss(logits, labels, 11, count)
    torch.testing.assert_close(layer(logits, labels, 11, count), stock)
    assert torch.equal(logits, before)
    head_of = {"hidden_states": x, "lm_head_weight": head}
    torch.testing.assert_close(layer(None, labels, 11, count, **head_of), stock)
    with pytest.raises(ValueError, match="expected logits or no final_logit_softcapping"):
        layer(None, labels, 11, final_logit_softcapping=30.0, **head_of)


def test_ops_are_in_the_namespace_of_the_build(repository):
    kernel = kernels.get_local_kernel(repository)
    build = __import__(f"{kernel.__name__}._ops", fromlist=["ops"])
    assert kernel.NAMESPACE == build._OPS_NAME != memsave_kernels.NAMESPACE
    assert hasattr(build.ops, "rms_norm_forward")


def test_kernels_reads_the_configuration():
    assert [str(backend) for backend in Build.open(ROOT).general.backends] == ["cuda"]
    assert "edition = 5\n" in (ROOT / "build.toml").read_text()


def test_the_card_is_filled():
    template = Environment(trim_blocks=True, undefined=StrictUndefined).from_string((ROOT / "CARD.md").read_text())
    card = template.render(
        license="apache-2.0", repo_id="a/b", version=1, functions=["f"], layers=["L"], has_benchmark=True, source=None
    )
    assert card.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n---\n")
    assert all(text in card for text in ('get_kernel("a/b", version=1', "\n- `f`\n", "\n- `L`\n", "benchmark a/b --v"))


def test_the_benchmark_is_found_and_its_results_agree(repository):
    (script,) = benchmark.discover_benchmark_scripts("", repository)
    (cls,) = benchmark.discover_benchmark_classes(script, repository)
    cls.tokens, cls.size, cls.vocabulary = 4, 32, 64
    results, _ = benchmark.run_benchmark_class(cls, 1, 0, str(repository), is_local=True, revision="local")
    assert {name: one.verified for name, one in results.items()} == dict.fromkeys(
        ("rms_norm", "gated", "linear_cross_entropy"), True
    )
    cls.benchmark_gated = lambda self: setattr(self, "out", 1.1 * self.verify_gated())
    with pytest.raises(RuntimeError, match="Verification failed for gated"):
        benchmark.run_benchmark_class(cls, 1, 0, str(repository), is_local=True, revision="local")


def test_the_example_runs(repository):
    environment = os.environ | {"PYTHONPATH": ""}
    run = subprocess.run(
        [sys.executable, repository / "example.py"], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.count("gradients differ by") == 3
