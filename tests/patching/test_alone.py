"""A layer patched by itself, in a model that is not: values against stock, kept bytes, and the way back."""

import copy
import pickle
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.parallel import DataParallel
from torch.utils.checkpoint import checkpoint
from transformers.activations import NewGELUActivation, QuickGELUActivation
from transformers.models.bert.modeling_bert import BertLayer, BertSelfAttention
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_memsave import WTACRS, MemSaveConfig, PatchError, measure_kept, patch, unpatch
from hf_memsave.patching.swap import patch_of
from support.helpers import assert_same_bits, only_on_cpu, random
from support.steps import assert_same, gradients, patched, patched_copy
from support.zoo import build, config_of

N, ROWS, WIDTH = 256 * 32, 256, 32
FLAT, IMAGE = (4, 64, WIDTH), (2, 16, 16, 16)  # N numbers each
EAGER = config_of("bert", attn_implementation="eager", attention_probs_dropout_prob=0.1)


class Layer(NamedTuple):
    """How to make a layer, what to patch it with, the bytes that frees, and the largest relative gradient error."""

    make: Any
    config: Any = True
    freed: int | None = None  # None: some
    error: float = 0.0
    shape: tuple[int, ...] = FLAT


def frozen(make):
    return lambda: make().requires_grad_(False)


LAYERS = {
    # Spared only where the tape also sees the layer after it, which stands outside.
    "gelu": Layer(nn.GELU, freed=0),
    "layer norm": Layer(lambda: nn.LayerNorm(WIDTH), freed=0),
    "layer norm from its output": Layer(lambda: nn.LayerNorm(WIDTH), "tempo", freed=0),
    "group norm": Layer(lambda: nn.GroupNorm(2, 16), freed=0, shape=IMAGE),
    "batch norm": Layer(lambda: nn.BatchNorm2d(16), freed=0, shape=IMAGE),
    "relu": Layer(nn.ReLU, freed=-N // 8),
    "relu in place": Layer(partial(nn.ReLU, inplace=True), freed=-N // 8),
    # What the layer keeps itself.
    "new gelu": Layer(NewGELUActivation, freed=3 * 4 * N),
    "quick gelu": Layer(QuickGELUActivation, freed=4 * N),
    "rms norm": Layer(lambda: LlamaRMSNorm(WIDTH)),
    "rms norm from its output": Layer(lambda: LlamaRMSNorm(WIDTH), "tempo"),
    "t5 norm": Layer(lambda: T5LayerNorm(WIDTH)),
    "dropout": Layer(lambda: nn.Dropout(0.3), freed=4 * N - N // 8),
    "dropout by seed": Layer(lambda: nn.Dropout(0.3), {"dropout": "seed"}, 4 * N - 5056),
    "frozen convolution": Layer(frozen(lambda: nn.Conv2d(16, 16, 3, padding=1)), freed=4 * N, shape=IMAGE),
    "frozen batch norm": Layer(frozen(lambda: nn.BatchNorm2d(16).eval()), shape=IMAGE),
    "max pool": Layer(lambda: nn.MaxPool2d(2), shape=IMAGE),
    "average pool": Layer(lambda: nn.AvgPool2d(2), shape=IMAGE),
    "gated mlp": Layer(lambda: LlamaMLP(config_of("llama", intermediate_size=64)), freed=2 * 2 * 4 * N),
    "eager attention": Layer(lambda: BertSelfAttention(EAGER)),
    "block": Layer(lambda: BertLayer(EAGER)),
    # Not exact.
    "gelu from its output": Layer(nn.GELU, "tempo", 4 * N - N // 8, 2e-3),
    "gelu by precision bit": Layer(nn.GELU, {"activation": "precision_bit"}, 4 * N, 2e-3),
    "gelu by 4 bits": Layer(nn.GELU, {"activation": "few_bit"}, 4 * N - (N // 2 + N // 1024), 0.1),
    "linear in 8 bits": Layer(lambda: nn.Linear(WIDTH, WIDTH), {"storage": "int8"}, None, 0.05),
}
EXACT = [name for name, layer in LAYERS.items() if not layer.error]


class Around(nn.Module):
    """Stock layers around the one under test, each of which keeps its input; the loss is a sum of squares."""

    def __init__(self, layer, shape):
        super().__init__()
        torch.manual_seed(1)
        of_images = shape == IMAGE
        self.before = nn.Conv2d(16, 16, 1) if of_images else nn.Linear(WIDTH, WIDTH)
        self.layer = layer
        self.after = nn.Conv2d(16, 4, 1) if of_images else nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.layer(self.before(x))
        return {"loss": self.after(y[0] if isinstance(y, tuple) else y).square().sum()}


def made(name, device):
    """The model around a stock layer, the same around a patched one, and a batch."""
    layer = LAYERS[name]
    torch.manual_seed(0)
    stock = layer.make().to(device)
    ours = patched_copy(stock, layer.config)
    x = random(*layer.shape, device=device)
    return Around(stock, layer.shape).to(device), Around(ours, layer.shape).to(device), x


def step(model, x, run=None):
    model.zero_grad()
    torch.manual_seed(3)
    loss = (run or model)(x.clone().requires_grad_())["loss"]
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_alone_errs_as_it_says_keeps_what_it_claims_and_is_stock_again(device, name):
    stock, ours, x = made(name, device)
    assert type(ours.layer).__name__ == type(stock.layer).__name__
    assert list(ours.state_dict()) == list(stock.state_dict())
    expected, got = step(stock, x), step(ours, x)
    if name not in EXACT:
        errors = {n: float((got[n] - expected[n]).norm() / expected[n].norm()) for n in expected}
        assert max(errors.values()) < LAYERS[name].error
        assert any(errors.values())
    elif device.type == "cpu":
        assert_same(got, expected)
    freed, claim = measure_kept(stock, x).total - measure_kept(ours, x).total, LAYERS[name].freed
    assert freed == claim if claim is not None else freed > 0
    with torch.no_grad():
        assert_same_bits(ours.eval()(x)["loss"], stock.eval()(x)["loss"])
    unpatch(ours.train().layer)
    stock.train()
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]
    assert [set(m.__dict__) for m in ours.modules()] == [set(m.__dict__) for m in stock.modules()]
    if device.type == "cpu":
        assert_same(step(ours, x), step(stock, x))
    assert measure_kept(ours, x).total == measure_kept(stock, x).total


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ["dropout", "gelu from its output", "block"])
def test_a_copy_of_a_layer_alone_opens_its_tape_too(device, name, how):
    only_on_cpu(device)
    _, ours, x = made(name, device)
    again = how(ours)
    assert_same(step(again, x), step(ours, x))
    assert measure_kept(again, x).total == measure_kept(ours, x).total


def test_few_bits_alone_before_a_frozen_layer(device):
    stock, ours, x = made("gelu by 4 bits", device)
    for model in (stock, ours):
        model.after.requires_grad_(False)
    assert measure_kept(stock, x).total - measure_kept(ours, x).total == 4 * N - (N // 2 + N // 1024)


@pytest.mark.parametrize("name", ["dropout", "gated mlp", "relu", "gelu by 4 bits", "eager attention"])
def test_a_layer_alone_runs_in_a_checkpoint_and_under_hooks(device, name):
    """Under a hook outside its input is taken to be held: then it is exact, also where it is not by itself."""
    only_on_cpu(device)
    stock, ours, x = made(name, device)
    alone, exact = step(ours, x), step(stock, x)
    assert all(map(torch.equal, alone.values(), exact.values())) == (name in EXACT)
    for use_reentrant, expected in ((True, alone), (False, exact)):  # the first runs again with no hook outside
        again = partial(checkpoint, lambda x: ours(x)["loss"], use_reentrant=use_reentrant)
        assert_same(step(ours, x, lambda x, again=again: {"loss": again(x)}), expected)
    with save_on_cpu():
        assert_same(step(ours, x), exact)


def test_the_report_names_the_layer_also_in_a_wrapper_and_compares_it(device):
    for outer, name in ((lambda layer: layer, ""), (DataParallel, "module")):
        layer = nn.Dropout(0.3)
        report = patch(outer(layer))
        assert [(s.name, s.op, s.cls, s.status) for s in report.sites] == [(name, "model", "Dropout", "patched")]
    report = patch(layer)
    assert report.compare(random(*FLAT, device=device).requires_grad_()).freed == 4 * N - N // 8
    assert patch_of(layer).config == MemSaveConfig()


def test_a_layer_of_a_patched_model_can_have_a_config_of_its_own(device):
    model = patched(build("llama").to(device))
    mlp = patched(model.model.layers[0].mlp, "tempo")
    assert patch_of(mlp.act_fn).value == "invert"
    unpatch(mlp)
    assert patch_of(mlp) is patch_of(mlp.act_fn) is None
    assert patch_of(model.model.layers[0]) is not None and patch_of(model) is not None


def sampled(device, make=lambda: nn.Linear(WIDTH, WIDTH), **options):
    torch.manual_seed(0)
    stock = make().to(device)
    ours = copy.deepcopy(stock)
    report = patch(ours, MemSaveConfig(linear=WTACRS(**options)))
    assert "wta_crs" in {site.op for site in report.patched}
    return Around(stock, FLAT).to(device), Around(ours, FLAT).to(device), random(*FLAT, device=device)


def test_the_linears_of_a_block_alone_and_the_products_of_attention_are_sampled(device):
    _, ours, x = sampled(device, lambda: BertLayer(EAGER))
    patches = [patch_of(module) for module in ours.modules()]
    assert sum(known is not None and known.op == "wta_crs" for known in patches) == 6
    step(ours, x)
    stock, ours, x = sampled(device, lambda: BertSelfAttention(EAGER), attention=True)
    assert not torch.equal(*(step(model, x)["layer.query.weight.grad"] for model in (ours, stock)))


def test_a_cache_by_sample_is_refused_for_a_part_alone():
    for part in (nn.Linear(4, 4), build("bert").bert.encoder.layer[0]):
        before = type(part)
        message = rf"expected a model of Transformers, which sees the batch, got {before.__name__}.*cache='position'"
        with pytest.raises(PatchError, match=message):
            patch(part, MemSaveConfig(linear=WTACRS(cache="sample_idx", samples=8)))
        assert type(part) is before
