"""Blocks in tiles: stock's loss to the bit, its gradients up to the order of sums, and the block's input alone kept."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_memsave import KeptTensorChangedError, patch
from hf_memsave.count.kept import measure_kept
from hf_memsave.count.peak import count_peak
from hf_memsave.logs import warn_once
from hf_memsave.ops.loss import chunked_loss
from hf_memsave.patching.tiled import PLANS, tile_tokens

SEQ, TILE = 96, 40
SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = {"intermediate_size": 72, "num_key_value_heads": 2}
#: Model type -> its class, and fields of its config.
FAMILIES = {
    "llama": ("LlamaForCausalLM", GATED),
    "llama, eager": ("LlamaForCausalLM", {**GATED, "attn_implementation": "eager"}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 50}),  # with dropouts
    "bert": ("BertForMaskedLM", {"intermediate_size": 64}),
    "bert, eager": ("BertForMaskedLM", {"intermediate_size": 64, "attn_implementation": "eager"}),
    "t5": (
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
         "vocab_size": 50},
    ),
    "bart": (
        "BartForConditionalGeneration",
        {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "vocab_size": 50,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64},
    ),
    "mixtral": ("MixtralForCausalLM", {**GATED, "num_local_experts": 4}),
    "phi": ("PhiForCausalLM", {"intermediate_size": 64}),
    "qwen3": ("Qwen3ForCausalLM", {**GATED, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", {**GATED, "head_dim": 8, "sliding_window": 16}),
    "gemma3": ("Gemma3ForCausalLM", {**GATED, "head_dim": 8, "sliding_window": 16}),
    "falcon": ("FalconForCausalLM", {"alibi": True}),
}  # fmt: skip
#: How many blocks of these run as a whole: the first of T5's stacks make the bias of the others.
WHOLE = {"t5": 2}


def model_of(name: str = "llama", **changes) -> nn.Module:
    cls, fields = FAMILIES[name]
    torch.manual_seed(0)
    kind = getattr(transformers, cls).config_class
    fields = (SIZES if "hidden_size" in kind().to_dict() and "d_model" not in fields else {}) | fields | changes
    return getattr(transformers, cls)(kind(**fields)).train()


def batch_of(model: nn.Module, **more) -> dict:
    torch.manual_seed(1)
    ids = torch.randint(0, 50, (2, SEQ))
    return {"input_ids": ids, "labels": ids, **more}


def step(model: nn.Module, batch: dict, seed: int = 2) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def reasons(model: nn.Module) -> list[str | None]:
    return [p.why_not for m in model.modules() if PLANS in m.__dict__ for p in m.__dict__[PLANS].values()]


def assert_alike(model: nn.Module, batch: dict, whole: int = 0, slack: float = 2e-6, is_equal: bool = True) -> None:
    """Loss and gradients are those of the stock model, with all blocks but ``whole`` in tiles."""
    expected, gradients = step(model, batch)
    patch(model, tiles=TILE)
    loss, found = step(model, batch)
    assert torch.equal(loss, expected) or not is_equal
    largest = max(float(g.norm()) for g in gradients.values())
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (found[name] - gradient).norm() <= slack * max(gradient.norm(), 1e-3 * largest), name
    assert len(reasons(model)) > whole == sum(why is not None for why in reasons(model)), reasons(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_is_equal_to_the_bit_and_gradients_up_to_the_order_of_sums(name):
    model = model_of(name)
    assert_alike(model, batch_of(model), WHOLE.get(name, 0))


def test_padding_and_packed_positions():
    model = model_of()
    mask = torch.ones(2, SEQ, dtype=torch.long)
    mask[0, :50] = 0
    assert_alike(model, batch_of(model, attention_mask=mask))
    packed = torch.arange(SEQ).remainder(37).repeat(2, 1)
    assert_alike(model_of(), batch_of(model, position_ids=packed, use_cache=False))


def test_lora_with_dropout_and_frozen_weights():
    model = get_peft_model(model_of(), LoraConfig(r=4, lora_dropout=0.3, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    assert_alike(model, batch_of(model))


@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=str)
def test_16_bits_and_autocast(dtype):
    """Also where backward runs within autocast, which would share casts of weights."""
    model = model_of()
    model = model if dtype is None else model.to(dtype)
    batch = batch_of(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
        assert_alike(model, batch, slack=1e-2, is_equal=False)


def test_short_sequences_run_as_a_whole_and_a_cache_as_in_stock():
    model = model_of()
    patch(model, checkpoint="tiles")
    batch = batch_of(model)
    step(model, batch)
    assert not reasons(model)  # 4096 tokens, where nothing tells what is free
    patch(model, tiles=TILE, replace=True)
    assert model(**batch, use_cache=True).past_key_values is not None
    model.eval().generate(batch["input_ids"][:, :50], max_new_tokens=2)
    with torch.no_grad():
        model(**batch)
    assert not reasons(model)


def test_accumulation_retained_graphs_and_second_derivatives():
    model = model_of()
    batch = batch_of(model)
    _, gradients = step(model, batch)
    patch(model, tiles=TILE)
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, 2 * gradients[name], rtol=1e-3, atol=1e-6)
    loss = model(**batch).loss
    (first,) = torch.autograd.grad(loss, model.model.layers[0].mlp.up_proj.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_hooks_of_weights_run_once():
    model, calls = model_of(), []
    patch(model, tiles=TILE)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.register_hook(calls.append)
    weight.register_post_accumulate_grad_hook(calls.append)
    step(model, batch_of(model))
    assert len(calls) == 2


@pytest.mark.parametrize("change", ["adapter", "disabled", "hook", "forward", "frozen"])
def test_what_changes_between_steps_is_seen(change):
    """Products of no use are known by their numbers: those of the code that ran."""
    model = get_peft_model(model_of(), LoraConfig(r=4, target_modules=["q_proj"]))
    model.add_adapter("other", LoraConfig(r=4, target_modules=["k_proj", "o_proj", "up_proj", "down_proj"]))
    model.set_adapter("default")
    stock, batch = copy.deepcopy(model), batch_of(model)
    patch(model, tiles=TILE)
    for one in (stock, model):
        step(one, batch)
        mlp = one.base_model.model.model.layers[1].mlp
        if change == "adapter":
            one.set_adapter("other")
        elif change == "disabled":
            one.base_model.disable_adapter_layers()
            one.requires_grad_(True)
        elif change == "hook":
            mlp.register_forward_hook(lambda _, args, out: out - out.mean(1, keepdim=True))
        elif change == "forward":
            mlp.forward = lambda x, run=mlp.forward: run(x).cumsum(1)
        else:
            one.requires_grad_(False)
            mlp.up_proj.weight.requires_grad_()
    (expected, gradients), (loss, found) = step(stock, batch), step(model, batch)
    assert torch.equal(loss, expected) and len(gradients) > 0
    torch.testing.assert_close(found, gradients, rtol=1e-3, atol=1e-7)


# What mixes tokens


class Shifted(LlamaMLP):
    """Each token sees the one before."""

    def forward(self, x):
        return super().forward(x + F.pad(x, (0, 0, 1, 0))[:, :-1])


class Far(LlamaMLP):
    """Each token sees the one 20 before."""

    def forward(self, x):
        return super().forward(x + F.pad(x, (0, 0, 20, 0))[:, :-20])


class Mean(LlamaMLP):
    """Each token sees the mean."""

    def forward(self, x):
        return super().forward(x - x.mean(1, keepdim=True))


class Hidden(LlamaMLP):
    """Each token sees the mean, through what lets no NaN pass."""

    def forward(self, x):
        return super().forward(x) * (1 + torch.nan_to_num(x).mean(1, keepdim=True))


class Capacity(LlamaMLP):
    """A mixture of experts, each of which takes no more than its part of the tokens: integers alone mix them."""

    def forward(self, x):
        choice = x[..., :2].argmax(-1, keepdim=True)
        place = F.one_hot(choice[..., 0], 2).cumsum(1).gather(-1, choice)
        return torch.where(place <= x.shape[1] // 2 + 1, super().forward(x), 0)


class Noisy(LlamaMLP):
    """It draws by itself."""

    def forward(self, x):
        return super().forward(x * torch.rand_like(x))


class Positions(LlamaMLP):
    """It counts tokens from the first that it sees."""

    def forward(self, x):
        return super().forward(x * torch.arange(x.shape[1])[:, None])


@pytest.mark.parametrize(
    ("cls", "why"),
    [(Shifted, "changes others"), (Far, "changes others"), (Mean, "changes others"), (Hidden, "changes others"),
     (Capacity, "others"), (Noisy, "random numbers"), (Positions, "how many others")],
)  # fmt: skip
def test_what_mixes_tokens_beside_attention_runs_as_a_whole_and_says_so(cls, why, caplog):
    model = model_of()
    model.model.layers[1].mlp.__class__ = cls
    batch = batch_of(model)
    expected, gradients = step(model, batch)
    warn_once.cache_clear()
    report = patch(model, tiles=TILE)
    loss, found = step(model, batch)
    assert [reason is None for reason in reasons(model)] == [True, False] and why in reasons(model)[1]
    assert why in caplog.text and why in str(report)
    assert torch.equal(loss, expected)
    torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-6)


class Causal(LlamaMLP):
    """Another attention, of few tokens another."""

    def forward(self, x):
        return F.scaled_dot_product_attention(super().forward(x), x, x, is_causal=x.shape[1] > 25)


class Short(LlamaMLP):
    """It runs on no 17 tokens."""

    def forward(self, x):
        return super().forward(x) if x.shape[1] != 17 else x.reshape(-1, 5)


@pytest.mark.parametrize("before", [None, 64], ids=["as the plan is made", "later"])
@pytest.mark.parametrize(("cls", "why"), [(Causal, "is_causal"), (Short, "fails on a part")])
def test_what_only_a_tile_of_this_length_shows_runs_as_a_whole(cls, why, before):
    model = model_of(num_hidden_layers=1)
    model.model.layers[0].mlp.__class__ = cls
    batch = {name: ids[:, :34] for name, ids in batch_of(model).items()}  # two tiles of 17
    expected, gradients = step(model, batch)
    patch(model, tiles=33)
    if before is not None:
        step(model, {name: ids[:, :before] for name, ids in batch_of(model).items()})
        assert reasons(model) == [None]
    loss, found = step(model, batch)
    assert len(reasons(model)) == 1 and why in reasons(model)[0]
    assert torch.equal(loss, expected)
    torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-6)


def test_a_gradient_for_what_is_neither_weight_nor_argument_is_not_lost():
    """Such as what an object holds that a block is called with."""
    model = model_of(num_hidden_layers=1)
    outside = torch.ones(32, requires_grad=True)

    class Scaled(LlamaMLP):
        def forward(self, x):
            return super().forward(x) * outside

    model.model.layers[0].mlp.__class__ = Scaled
    patch(model, tiles=TILE)
    step(model, batch_of(model))
    assert "no weight of its own or argument" in reasons(model)[0] and outside.grad is not None


def test_blocks_of_zero3_run_as_a_whole():
    model = model_of()
    for parameter in model.parameters():
        parameter.ds_id = 0
    assert_whole(model, "ZeRO-3")


def test_what_a_module_keeps_of_a_call_is_whole():
    """Such as an auxiliary loss: of tiles it would be the last one's, without a graph."""

    class Keeps(LlamaMLP):
        def forward(self, x):
            y = super().forward(x)
            self.last, self.count = y, self.count + 1
            self.all.append(y)
            return y

    model = model_of(num_hidden_layers=1)
    mlp, batch = model.model.layers[0].mlp, batch_of(model)
    mlp.__class__, mlp.count, mlp.all, mlp.last = Keeps, 0, [], None
    patch(model, tiles=TILE)
    loss = model(**batch).loss
    assert "keeps what it computes" in reasons(model)[0]
    assert mlp.count == len(mlp.all) == 1 and mlp.last.shape[1] == SEQ and mlp.last.requires_grad
    (loss + mlp.last.pow(2).mean()).backward()


def test_no_attention_and_hooks_are_named():
    model = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, state_size=4)
    ).train()
    assert_whole(model, "no attention")
    model = model_of()
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda *_: None)
    assert_whole(model, "has hooks")


def assert_whole(model: nn.Module, why: str) -> None:
    batch = batch_of(model)
    expected, gradients = step(model, batch)
    patch(model, tiles=TILE)
    loss, found = step(model, batch)
    assert all(why in reason for reason in reasons(model))
    assert torch.equal(loss, expected) and all(torch.equal(found[n], g) for n, g in gradients.items())


def test_what_changed_since_the_forward_is_refused():
    model = model_of()
    patch(model, tiles=TILE)
    loss = model(**batch_of(model)).loss
    model.model.layers[0].mlp.eval()
    with pytest.raises(KeptTensorChangedError, match="switched by train"):
        loss.backward()


# Bytes


def test_kept_is_the_input_and_a_bit_an_element_of_dropouts():
    model = model_of("gpt2", attn_pdrop=0.0)
    batch = batch_of(model)
    patch(model, tiles=TILE)
    step(model, batch)
    u = 2 * SEQ * 32 * 4
    by_module = measure_kept(model, batch).by_module
    kept = sum(nbytes for name, nbytes in by_module.items() if name.startswith("transformer.h"))
    assert 2 * u < kept <= 2 * u * (1 + 2 / 32) + 1024, by_module  # two blocks of two dropouts


@functools.cache
def peak(layers: int, **fields) -> float:
    """Of a step, without the head, in bytes of a hidden state."""
    model = model_of(num_hidden_layers=layers, hidden_size=64, intermediate_size=224)
    ids = torch.randint(0, 50, (1, 1024))
    if fields:
        patch(model, **fields)
    else:
        model.gradient_checkpointing_enable()

    def run():
        model.model(ids, use_cache=False)[0].sum().backward()

    run()
    return count_peak(run).peak / (1024 * 64 * 4)


@pytest.mark.parametrize(("kind", "tile", "bar"), [("full", 128, 14.5), ("lora", 96, 14.5)])
def test_a_whole_step_takes_no_more_than_inputs_of_blocks_and_one_tile(kind, tile, bar, monkeypatch):
    """1/8 of 8192 tokens and of a width of 512, in hidden states: stock's checkpointing takes 33.8 and 53.7."""
    monkeypatch.setattr(chunked_loss, "CHUNK", chunked_loss.CHUNK // 64)
    model = model_of(
        num_hidden_layers=4, hidden_size=64, intermediate_size=224, num_attention_heads=8, vocab_size=32,
        max_position_embeddings=1024,
    )  # fmt: skip
    if kind == "lora":
        model = get_peft_model(model.to(torch.bfloat16), LoraConfig(r=1, target_modules="all-linear"))
        for parameter in model.parameters():
            parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    patch(model, tiles=tile)
    ids = torch.randint(0, 32, (1, 1024))

    def run():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    run()
    assert count_peak(run).peak / (1024 * 64 * model.get_input_embeddings().weight.itemsize) <= bar
    assert set(reasons(model)) == {None}


def test_no_tile_outlives_its_turn():
    """A graph that stays would take as much as with checkpoint="block"; smaller tiles take less."""
    large, small = peak(2, tiles=256), peak(2, tiles=64)
    assert small < 0.8 * large < 0.6 * peak(2, checkpoint="block") and peak(3, tiles=64) - small < 1.2


def test_tokens_of_a_tile():
    block, hidden = model_of().model.layers[0], torch.empty(2, 100_000, 32, device="meta")
    assert tile_tokens(64, block, hidden) == 64 and tile_tokens("auto", block, hidden) == 2048
    sizes = [tile_tokens("auto", block, hidden, free=free) for free in (0, 2**28, 2**33, 2**40)]
    assert sizes[0] == 2048 and sizes == sorted(sizes) and sizes[1] % 1024 == 0 and sizes[-1] == 100_000
