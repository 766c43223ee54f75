"""A layer patched by itself, in a model that is not: values against stock, kept bytes, and the way back."""

import copy
import pickle
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.parallel import DataParallel
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, LlamaConfig
from transformers.activations import NewGELUActivation, QuickGELUActivation
from transformers.models.bert.modeling_bert import BertLayer, BertSelfAttention
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hf_memsave import WTACRS, MemSaveConfig, PatchError, measure_kept, patch, unpatch
from hf_memsave.patching.swap import binding_of
from hf_memsave.tape import Tape
from support.families import build
from support.helpers import assert_same_bits, only_on_cpu, random

N, ROWS, WIDTH = 256 * 32, 256, 32
FLAT, IMAGE = (4, 64, WIDTH), (2, 16, 16, 16)  # N numbers each
EAGER = dict(attn_implementation="eager", hidden_size=WIDTH, num_attention_heads=4, attention_probs_dropout_prob=0.1)


class Layer(NamedTuple):
    """How to make a layer, what to patch it with, the bytes that frees, and the largest relative gradient error."""

    make: Any
    config: Any = True
    freed: int | None = None  # None: some
    error: float = 0.0
    shape: tuple[int, ...] = FLAT


def frozen(make):
    return lambda: make().requires_grad_(False)


def in_eval(make):
    return lambda: make().requires_grad_(False).eval()


LAYERS = {
    # Only promised to the layer after it, which stands outside.
    "gelu": Layer(nn.GELU, freed=0),
    "layer norm": Layer(lambda: nn.LayerNorm(WIDTH), freed=0),
    "group norm": Layer(lambda: nn.GroupNorm(2, 16), freed=0, shape=IMAGE),
    "batch norm": Layer(lambda: nn.BatchNorm2d(16), freed=0, shape=IMAGE),
    "relu": Layer(nn.ReLU, freed=-N // 8),
    "relu in place": Layer(partial(nn.ReLU, inplace=True), freed=-N // 8),
    # What the layer keeps itself.
    "new gelu": Layer(NewGELUActivation, freed=3 * 4 * N),
    "quick gelu": Layer(QuickGELUActivation, freed=4 * N),
    "rms norm": Layer(lambda: LlamaRMSNorm(WIDTH)),
    "t5 norm": Layer(lambda: T5LayerNorm(WIDTH)),
    "dropout": Layer(lambda: nn.Dropout(0.3), freed=4 * N - 5056),
    "dropout by mask": Layer(lambda: nn.Dropout(0.3), {"dropout": "mask"}, 4 * N - N // 8),
    "frozen convolution": Layer(frozen(lambda: nn.Conv2d(16, 16, 3, padding=1)), freed=4 * N, shape=IMAGE),
    "frozen batch norm": Layer(in_eval(lambda: nn.BatchNorm2d(16)), shape=IMAGE),
    "max pool": Layer(lambda: nn.MaxPool2d(2), shape=IMAGE),
    "average pool": Layer(lambda: nn.AvgPool2d(2), shape=IMAGE),
    "gated mlp": Layer(lambda: LlamaMLP(LlamaConfig(hidden_size=WIDTH, intermediate_size=64)), freed=2 * 2 * 4 * N),
    "eager attention": Layer(lambda: BertSelfAttention(BertConfig(**EAGER))),
    "block": Layer(lambda: BertLayer(BertConfig(**EAGER, intermediate_size=64))),
    # Not exact.
    "gelu from its output": Layer(nn.GELU, "tempo", 4 * N - N // 8, 2e-3),
    "gelu by precision bit": Layer(nn.GELU, {"activation": "precision_bit"}, 4 * N, 2e-3),
    "gelu by 4 bits": Layer(nn.GELU, {"activation": "few_bit"}, 4 * N - N // 2, 0.1),
    "layer norm from its output": Layer(lambda: nn.LayerNorm(WIDTH), "tempo", 4 * N + 4 * ROWS, 1e-5),
    "rms norm from its output": Layer(lambda: LlamaRMSNorm(WIDTH), "tempo", None, 1e-5),
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
    ours = copy.deepcopy(stock)
    patch(ours, layer.config)
    x = random(*layer.shape, device=device)
    return Around(stock, layer.shape).to(device), Around(ours, layer.shape).to(device), x


def step(model, x, run=None):
    """Loss and gradients."""
    model.zero_grad()
    torch.manual_seed(3)
    loss = (run or model)(x.clone().requires_grad_())["loss"]
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name in expected:
        assert_same_bits(got[name], expected[name], name)


@pytest.mark.parametrize("name", EXACT)
def test_a_layer_alone_is_exact(device, name):
    only_on_cpu(device)
    stock, ours, x = made(name, device)
    assert_same(step(ours, x), step(stock, x))


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in EXACT])
def test_a_layer_alone_errs_as_it_says(device, name):
    stock, ours, x = made(name, device)
    expected, got = step(stock, x), step(ours, x)
    errors = {n: float((got[n] - expected[n]).norm() / expected[n].norm()) for n in expected}
    assert max(errors.values()) < LAYERS[name].error
    assert any(errors.values())


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_alone_keeps_what_it_claims(device, name):
    stock, ours, x = made(name, device)
    freed = measure_kept(stock, x).total - measure_kept(ours, x).total
    claim = LAYERS[name].freed
    assert freed == claim if claim is not None else freed > 0


def test_few_bits_alone_before_a_frozen_layer(device):
    stock, ours, x = made("gelu by 4 bits", device)
    for model in (stock, ours):
        model.after.requires_grad_(False)
    assert measure_kept(stock, x).total - measure_kept(ours, x).total == 4 * N - N // 2


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_alone_is_stock_in_eval_and_after_undo(device, name):
    only_on_cpu(device)
    stock, ours, x = made(name, device)
    assert type(ours.layer).__name__ == type(stock.layer).__name__
    assert list(ours.state_dict()) == list(stock.state_dict())
    for model in (stock, ours):
        model.eval()
    with torch.no_grad():
        assert_same_bits(ours(x)["loss"], stock(x)["loss"])
    for model in (stock, ours):
        model.train()
    unpatch(ours.layer)
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]
    assert [set(m.__dict__) for m in ours.modules()] == [set(m.__dict__) for m in stock.modules()]
    assert_same(step(ours, x), step(stock, x))
    assert measure_kept(ours, x).total == measure_kept(stock, x).total


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("name", ["dropout", "gated mlp", "gelu from its output", "block"])
def test_a_copy_of_a_layer_alone_opens_its_tape_too(device, name, how):
    only_on_cpu(device)
    _, ours, x = made(name, device)
    again = how(ours)
    assert_same(step(again, x), step(ours, x))
    assert measure_kept(again, x).total == measure_kept(ours, x).total


@pytest.mark.parametrize(
    "name", ["dropout", "gated mlp", "gelu", "relu", "new gelu", "gelu by 4 bits", "eager attention"]
)
def test_a_layer_alone_runs_in_a_checkpoint_and_under_hooks(device, name):
    only_on_cpu(device)
    _, ours, x = made(name, device)
    expected = step(ours, x)
    for use_reentrant in (True, False):
        again = partial(checkpoint, lambda x: ours(x)["loss"], use_reentrant=use_reentrant)
        assert_same(step(ours, x, lambda x, again=again: {"loss": again(x)}), expected)
    with save_on_cpu():
        assert_same(step(ours, x), expected)


def test_a_layer_alone_takes_the_tape_that_is_there(device):
    _, ours, x = made("gelu", device)
    alone = measure_kept(ours, x).total

    class Taped(nn.Module):
        def forward(self, x):
            with Tape():
                return ours(x)

    assert measure_kept(Taped(), x).total == alone - 4 * N


def test_a_model_that_is_patched_later_takes_the_layer_over(device):
    _, ours, x = made("gelu", device)
    alone = measure_kept(ours, x).total
    assert binding_of(ours.layer).alone == MemSaveConfig()
    report = patch(ours)
    assert binding_of(ours.layer).alone is None
    assert measure_kept(ours, x).total == alone - 4 * N
    report.undo()
    assert binding_of(ours.layer) is None


def test_layers_alone_side_by_side(device):
    only_on_cpu(device)

    def make():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(16, 8, 1), nn.ReLU()
        ).to(device)

    def gradients(model):
        torch.manual_seed(4)
        model(random(*IMAGE, device=device)).square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    ours, stock = make(), make()
    for layer in ours:
        patch(layer)
    assert_same(gradients(ours), gradients(stock))


@pytest.mark.parametrize("inside", [0, 1], ids=["the relu", "what keeps its output"])
@pytest.mark.parametrize("hooks", ["checkpoint", "save_on_cpu"])
def test_a_mask_and_what_keeps_its_tensor_may_run_under_different_hooks(device, hooks, inside):
    only_on_cpu(device)
    found = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.ReLU())]
        parts = [part.to(device) for part in parts]
        x = random(5, 8, device=device).requires_grad_()
        y = x
        for i, part in enumerate(parts):
            if is_ours:
                patch(part)
            if i != inside:
                y = part(y)
            elif hooks == "checkpoint":
                y = checkpoint(part, y, use_reentrant=False)
            else:
                with save_on_cpu():
                    y = part(y)
        y.square().sum().backward()
        found.append([x.grad, *(p.grad for part in parts for p in part.parameters())])
    for mine, theirs in zip(*found, strict=True):
        assert_same_bits(mine, theirs)


def test_the_report_says_that_a_layer_stands_alone(device):
    layer = nn.GELU()
    report = patch(layer)
    assert [(site.name, site.op, site.status) for site in report.sites] == [("", "activation", "patched")]
    assert "patched by itself: what the layers after it keep of its output, they keep as in stock" in str(report)
    assert "patched by itself" not in str(patch(nn.Sequential(layer)))


def test_compare_works_on_a_layer_alone(device):
    layer = nn.Dropout(0.3)
    comparison = patch(layer).compare(random(*FLAT, device=device).requires_grad_())
    assert comparison.freed == 4 * N - 5056
    assert binding_of(layer).alone is not None


def test_a_layer_alone_inside_a_wrapper(device):
    layer = NewGELUActivation()
    patch(DataParallel(layer))
    assert binding_of(layer).alone == MemSaveConfig()


def test_an_adapter_layer_alone(device):
    only_on_cpu(device)

    def make():
        torch.manual_seed(0)
        base = nn.Sequential(nn.Linear(WIDTH, WIDTH)).to(torch.bfloat16)
        model = get_peft_model(base, LoraConfig(target_modules=["0"], lora_dropout=0.2, init_lora_weights=False))
        return model.base_model.model[0].float().to(device)

    stock, ours = (Around(make(), FLAT).to(device) for _ in range(2))
    patch(ours.layer)
    x = random(*FLAT, device=device)
    assert_same(step(ours, x), step(stock, x))
    assert measure_kept(ours, x).total < measure_kept(stock, x).total


@pytest.mark.parametrize("config", [True, "tempo"])
def test_a_linear_alone_has_nothing_to_patch(config):
    with pytest.raises(PatchError, match="nothing to patch in Linear"):
        patch(nn.Linear(4, 4), config)


# Sampled


def sampled(device, make=lambda: nn.Linear(WIDTH, WIDTH), **options):
    torch.manual_seed(0)
    stock = make().to(device)
    ours = copy.deepcopy(stock)
    report = patch(ours, MemSaveConfig(linear=WTACRS(**options)))
    assert "wta_crs" in {site.op for site in report.patched}
    return Around(stock, FLAT).to(device), Around(ours, FLAT).to(device), random(*FLAT, device=device)


def test_a_sampled_linear_alone_keeps_rows_and_is_unbiased(device):
    stock, ours, x = sampled(device, budget=0.3)
    drawn = round(0.3 * ROWS)
    freed = measure_kept(stock, x).total - measure_kept(ours, x).total
    assert freed == 4 * (N - drawn * WIDTH) - 4 * drawn - ROWS  # an index a row, and the tokens' mask
    expected = step(stock, x)
    draws = [step(ours, x) for _ in range(300)]
    assert_same_bits(draws[0]["loss"], expected["loss"])
    assert_same_bits(draws[0]["before.weight"], expected["before.weight"])
    weights = torch.stack([draw["layer.weight"] for draw in draws])
    error = (weights.mean(0) - expected["layer.weight"]).norm()
    noise = (weights.var(0) / len(draws)).sum().sqrt()
    assert 0 < error < 2 * noise < 0.3 * expected["layer.weight"].norm()


def test_a_sampled_linear_alone_is_exact_in_eval_and_after_undo(device):
    only_on_cpu(device)
    stock, ours, x = sampled(device)
    ours.eval()
    assert_same(step(ours, x), step(stock, x))
    ours.train()
    unpatch(ours.layer)
    assert set(ours.layer.__dict__) == set(stock.layer.__dict__)
    assert_same(step(ours, x), step(stock, x))


def test_the_linears_of_a_block_alone_are_sampled(device):
    _, ours, x = sampled(device, lambda: BertLayer(BertConfig(**EAGER, intermediate_size=64)))
    bindings = [binding_of(module) for module in ours.modules()]
    assert sum(binding is not None and binding.op.name == "wta_crs" for binding in bindings) == 6
    step(ours, x)


def test_the_products_of_attention_alone_are_sampled(device):
    stock, ours, x = sampled(device, lambda: BertSelfAttention(BertConfig(**EAGER)), attention=True)
    assert not torch.equal(step(ours, x)["layer.query.weight"], step(stock, x)["layer.query.weight"])


@pytest.mark.parametrize("options", [{"cache": "content"}, {"cache": "sample_idx", "samples": 9}], ids=str)
def test_a_cache_by_sample_is_refused_for_a_layer_alone(options):
    layer = nn.Linear(4, 4)
    with pytest.raises(PatchError, match=r"tells samples apart by a model's batch.*Linear.*cache='position'"):
        patch(layer, MemSaveConfig(linear=WTACRS(**options)))
    assert type(layer) is nn.Linear


@pytest.mark.parametrize("options", [{"cache": "content"}, {"cache": "sample_idx", "samples": 8}], ids=str)
def test_a_cache_by_sample_is_refused_for_a_block_alone(options):
    block = build("bert").bert.encoder.layer[0]
    with pytest.raises(PatchError, match="does not see"):
        patch(block, MemSaveConfig(linear=WTACRS(**options)))


def test_a_layer_of_a_patched_model_can_have_a_config_of_its_own(device):
    model = build("llama").to(device)
    patch(model)
    mlp = model.model.layers[0].mlp
    patch(mlp, "tempo")
    assert binding_of(mlp.act_fn).value == "invert"
    unpatch(mlp)
    assert binding_of(mlp) is None and binding_of(model.model.layers[1].mlp) is not None
