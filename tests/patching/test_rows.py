"""Submodules in rows: stock's loss, its gradients up to the order of sums; what mixes rows runs whole."""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_memsave import KeptTensorChangedError, measure_kept, patch
from hf_memsave.count.peak import count_peak
from hf_memsave.logs import warn_once
from hf_memsave.ops.loss import chunked_loss
from hf_memsave.patching.rows import reasons
from support import accuracy
from support.helpers import GoesBack
from support.in_rows import SIZE, TILE, assert_near, in_rows, whole
from support.steps import backward, patched, patched_copy, step
from support.zoo import Size, batch_for, build

#: Family -> fields of its config, and the classes in rows; of the others their own code keeps what is wide.
FAMILIES = {
    "llama": ({}, {"LlamaMLP", "LlamaRMSNorm"}),
    "llama, eager": ({"attn_implementation": "eager"}, {"LlamaMLP", "LlamaRMSNorm"}),
    "gpt2": ({"attn_pdrop": 0.1}, {"GPT2MLP"}),
    "mixtral": ({}, {"MixtralExperts", "MixtralRMSNorm"}),
    "qwen3_moe": ({}, {"Qwen3MoeExperts", "Qwen3MoeRMSNorm"}),
    "bert": ({"head": "ForMaskedLM", "attention_probs_dropout_prob": 0.1}, set()),
    "t5-encoder": ({}, {"T5LayerFF", "T5LayerNorm"}),
    "phi": ({}, {"PhiMLP"}),
    "deepseek_v3": ({}, {"DeepseekV3Experts", "DeepseekV3MLP", "DeepseekV3RMSNorm"}),
    "qwen3": ({}, {"Qwen3MLP", "Qwen3RMSNorm"}),
    "gemma2": ({"sliding_window": 16}, {"Gemma2MLP", "Gemma2RMSNorm"}),
    "falcon": ({"alibi": True}, {"FalconMLP"}),
    "opt": ({}, set()),
}


def model_of(name="llama", dtype=torch.float32, **more):
    model = build(name.partition(",")[0], SIZE, dtype, **FAMILIES[name][0] | more)
    for module in model.modules():  # as stock has it, and a bias that is trained
        if type(module).__name__ == "T5Attention":
            module.dropout = 0.1
    return model.requires_grad_()


def batch_of(model, tokens=SIZE.seq, **more):
    return {name: x[:, :tokens] for name, x in batch_for(model, SIZE).items() if name != "attention_mask"} | more


def lora(model, p=0.3, **options):
    torch.manual_seed(0)
    options = dict(r=4, lora_dropout=p, target_modules="all-linear", init_lora_weights=False) | options
    return get_peft_model(model, LoraConfig(**options)).train()


def assert_alike(model, batch, expected_rows, slack=2e-6, is_equal=True):
    """Loss and gradients are those of the stock model, with modules of these classes in rows."""
    expected = step(model, batch)
    patch(model, tiles=TILE)
    found = step(model, batch)
    assert torch.equal(found["loss"], expected["loss"]) or not is_equal
    assert_near(found, expected, slack, least=1e-3)
    assert in_rows(model) == expected_rows
    assert all("no wider" in why for why in whole(model).values()), whole(model)


@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_stocks(name):
    model = model_of(name)
    assert_alike(model, batch_of(model), FAMILIES[name][1])


def test_padding_and_packed_positions():
    model = model_of()
    mask = torch.ones(2, SIZE.seq, dtype=torch.long)
    mask[0, :50] = 0
    assert_alike(model, batch_of(model, attention_mask=mask), FAMILIES["llama"][1])
    packed = torch.arange(SIZE.seq).remainder(37).repeat(2, 1)
    assert_alike(model_of(), batch_of(model, position_ids=packed, use_cache=False), FAMILIES["llama"][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lora_with_dropout_on_frozen_weights(dtype):
    """Masks are stock's, also where adapters are in fp32 on weights in bf16."""
    model = lora(model_of().to(dtype))
    slack = 2e-6 if dtype is torch.float32 else 2e-2
    assert_alike(model, batch_of(model), {"LlamaMLP", "LlamaRMSNorm", "Linear"}, slack, dtype is torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=str)
def test_16_bits_and_autocast(dtype):
    """Also where backward runs within autocast, which would share casts of weights."""
    model = model_of(dtype=dtype or torch.float32)
    batch = batch_of(model)
    low = None if dtype else torch.bfloat16
    expected = step(model, batch, low=low)
    patch(model, tiles=TILE)
    assert_near(step(model, batch, low=low), expected, 2e-2, least=1e-3)
    assert in_rows(model) == FAMILIES["llama"][1] and not whole(model)
    with torch.autocast("cpu", torch.bfloat16):
        backward(model, model(**batch).loss)


def test_short_sequences_run_as_a_whole_and_a_cache_as_in_stock():
    model = patched(model_of(), checkpoint="tiles")
    batch = batch_of(model)
    step(model, batch)
    assert not in_rows(model)  # 4096 rows
    patch(model, tiles=TILE, replace=True)
    assert model(**batch, use_cache=True).past_key_values is not None
    model.eval().generate(batch["input_ids"][:, :50], max_new_tokens=2)
    with torch.no_grad():
        model(**batch)
    patch(model, tiles=1, replace=True)
    assert_near(step(model, batch), step(model_of(), batch), 2e-6, least=1e-3)


def test_retained_graphs_batched_gradients_and_second_derivatives():
    stock, found = model_of("llama, eager", torch.float64), []  # SDPA's kernel has no second derivative
    stock.model.layers[1].mlp = stock.model.layers[0].mlp  # which depends on it, too
    batch = batch_of(stock)
    for model in (stock, patched_copy(stock, tiles=TILE)):
        weights = [p for name, p in model.named_parameters() if "layers.0.mlp" in name or "layers.1.input" in name]
        loss = model(**batch).loss
        grads = [torch.autograd.grad(loss, weights, retain_graph=True) for _ in range(2)]
        many = torch.autograd.grad(loss, weights, torch.tensor([1.0, 3.0]).double(), True, is_grads_batched=True)
        first = torch.autograd.grad(loss, weights, create_graph=True)
        sum(g.square().sum() for g in first).backward()
        second = {name: p.grad for name, p in model.named_parameters()}
        found.append(dict(enumerate([*grads[0], *grads[1], *many, *first])) | second)
    assert in_rows(model) == FAMILIES["llama"][1]
    assert_near(found[1], found[0], 1e-6)  # norms compute in fp32


def test_second_derivatives_with_dropout():
    stock, found = model_of("gpt2", torch.float64, attn_implementation="eager"), []
    for model in (stock, patched_copy(stock, tiles=TILE)):
        torch.manual_seed(5)
        first = torch.autograd.grad(model(**batch_of(model)).loss, [*model.parameters()], create_graph=True)
        found.append(dict(enumerate(torch.autograd.grad(sum(g.square().sum() for g in first), [*model.parameters()]))))
    assert_near(found[1], found[0], 1e-6)


def test_hooks_of_weights_run_once_and_others_see_all_tokens():
    model, calls, seen = model_of(), [], []
    patch(model, tiles=TILE)
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight.register_hook(calls.append)
    mlp.up_proj.weight.register_post_accumulate_grad_hook(calls.append)
    mlp.register_forward_hook(lambda module, args, out: seen.append(out))
    mlp.register_full_backward_hook(lambda module, dx, dy: seen.append(dy[0]))
    step(model, batch_of(model))
    assert len(calls) == 2 and {x.shape for x in seen} == {(SIZE.batch, SIZE.seq, SIZE.hidden)}
    assert in_rows(model) == FAMILIES["llama"][1]


@pytest.mark.parametrize("change", ["adapter", "disabled", "hook", "forward", "frozen"])
def test_what_changes_between_steps_is_seen(change):
    model = lora(model_of(), 0.0, target_modules=["q_proj"])
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
    expected, found = step(stock, batch), step(model, batch)
    assert torch.equal(found["loss"], expected["loss"]) and len(expected) > 1
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-7)


def test_what_changed_since_the_forward_is_refused():
    model = patched(model_of(), tiles=TILE)
    loss = model(**batch_of(model)).loss
    model.model.layers[0].mlp.eval()
    with pytest.raises(KeptTensorChangedError, match="switched by train"):
        loss.backward()


def test_a_weight_written_to_since_the_forward_raises(small_chunks):
    """That of the last norm: blocks run again with the weights of then, as in stock."""
    model = patched(with_norm(), checkpoint="block")
    loss = model(**batch_for(model, accuracy.LONG)).loss
    with torch.no_grad():
        norm_of(model).weight.mul_(2)
    with pytest.raises(KeptTensorChangedError, match="inplace"):
        loss.backward()
    assert is_in_rows(model)


def test_routers_losses_are_stocks():
    """Routers' logits come by hooks, in the first step or in a later one."""
    stock = build("mixtral", SIZE, torch.float64)
    stock.set_experts_implementation("eager")
    ours = patched_copy(stock, tiles=10)
    for more in ({}, {"output_router_logits": True}, {}):
        assert_near(step(ours, batch_of(stock, **more)), step(stock, batch_of(stock, **more)))
    assert "MixtralExperts" in in_rows(ours)


@pytest.mark.parametrize(("name", "more"), [("llama", 0), ("gemma2", 1)])
def test_an_mlp_runs_no_third_time_unless_what_follows_keeps_its_output(name, more, monkeypatch):
    model = patched(model_of(name, num_hidden_layers=1), tiles=TILE)
    step(model, batch_of(model))
    calls, cls = [], type(model.model.layers[0].mlp.act_fn)
    stock = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, x: calls.append(x.shape[1]) or stock(self, x))
    step(model, batch_of(model))
    assert [n for n in calls if n > 16] == [64] * 3 * (2 + more)


# What mixes rows


class Own(LlamaMLP):
    """``run`` of stock's function, x and the module."""

    def forward(self, x):
        return self.run(super().forward, x, self)


def llama(run, layers=(1,), dtype=torch.float64, **fields):
    """These layers have an MLP of their own."""
    model = build("llama", SIZE, dtype, **fields)
    for number in layers:
        mlp = model.model.layers[number].mlp
        mlp.__class__, mlp.run = Own, run
    return model


def before(x, tokens):
    """Of each token, the one so many before."""
    return F.pad(x, (0, 0, tokens, 0))[:, :-tokens]


def with_capacity(mlp, x, _):
    """A mixture of experts, each of which takes no more than its part of the tokens: integers alone mix them."""
    choice = x[..., :2].argmax(-1, keepdim=True)
    place = F.one_hot(choice[..., 0], 2).cumsum(1).gather(-1, choice)
    return torch.where(place <= x.shape[1] // 2 + 1, mlp(x), 0)


class Auxiliary(torch.autograd.Function):
    """Adds the gradient of a loss of its own: the mean, over tokens, of a weight's squares."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx, ctx.saved_tensors[0].clone()


def keeping(mlp, x, module):
    module.last, module.count = mlp(x), module.count + 1
    module.all.append(module.last)
    return module.last


def counting(mlp, x, module):
    module.calls.add_(1)
    return mlp(x)


OUTSIDE = torch.ones(32, dtype=torch.float64, requires_grad=True)
#: What an MLP does -> why it runs whole.
MIXING = {
    "the token before": (lambda mlp, x, _: mlp(x + before(x, 1)), ""),
    "one 20 before": (lambda mlp, x, _: mlp(x + before(x, 20)), ""),
    "the mean": (lambda mlp, x, _: mlp(x - x.mean(1, keepdim=True)), ""),
    "the mean, where no NaN passes": (lambda mlp, x, _: mlp(x) + torch.nan_to_num(x).mean(1, keepdim=True), ""),
    "a sum times 0": (lambda mlp, x, _: mlp(x) + 0 * x.sum(1, keepdim=True), "changes others"),
    "over sequences": (lambda mlp, x, _: mlp(x - x.mean(0, keepdim=True)), ""),
    "capacity": (with_capacity, ""),
    "a count that no part reaches": (
        lambda mlp, x, _: mlp(x) * (x.new_ones(x.shape[:2]).cumsum(1) <= 85)[..., None], "counts"
    ),
    "drawing": (lambda mlp, x, _: mlp(x * torch.rand_like(x)), "random numbers"),
    "a mask for all tokens": (
        lambda mlp, x, _: mlp(x) * F.dropout(x.new_ones(len(x), 1, x.shape[-1]), 0.3, True), "drops out"
    ),
    "other dropout": (lambda mlp, x, _: F.alpha_dropout(mlp(x), 0.3, True), "drops out"),
    "counting from the first": (lambda mlp, x, _: mlp(x * torch.arange(x.shape[1])[:, None]), ""),
    "the last": (lambda mlp, x, _: torch.cat([mlp(x[:, :-1]), 2 * mlp(x[:, -1:])], dim=1), ""),
    "the count": (lambda mlp, x, _: mlp(x / x.shape[1]), ""),
    "the batch": (lambda mlp, x, _: mlp(x / x.shape[0]), ""),
    "softmax": (lambda mlp, x, _: mlp(x.softmax(1)), ""),
    "half": (lambda mlp, x, _: mlp(x) * (x.sum(-1) >= x.sum(-1).median(1, keepdim=True).values)[..., None], ""),
    "far on both sides": (
        lambda mlp, x, _: mlp(x + F.conv1d(x.mT, x.new_ones(32, 1, 3), padding=16, dilation=16, groups=32).mT), ""
    ),
    "in backward alone": (lambda mlp, x, _: GoesBack.apply(mlp(x), lambda dy: dy - dy.mean(1, keepdim=True)), ""),
    "a weight's own loss": (lambda mlp, x, m: mlp(Auxiliary.apply(x, m.up_proj.weight)), ""),
    "outside": (lambda mlp, x, _: mlp(x) * OUTSIDE, "no parameter of its own"),
    "in place": (lambda mlp, x, _: mlp(x.mul_(0.5)), "in-place"),
    "its input": (lambda mlp, x, _: x, "hands it on"),
    "keeping": (keeping, "keeps what it computes"),
    "counting in a buffer": (counting, "keeps what it computes"),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_rows_runs_whole_and_says_so(name, caplog):
    run, why = MIXING[name]
    stock = llama(run)
    mlp = stock.model.layers[1].mlp
    mlp.count, mlp.all, mlp.last = 0, [], None
    mlp.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    ours, batch, found = copy.deepcopy(stock), batch_of(stock), []
    warn_once.cache_clear()
    report = patch(ours, tiles=TILE)
    for model in (stock, ours):
        OUTSIDE.grad = None
        found.append(step(model, batch) | ({} if OUTSIDE.grad is None else {"outside": OUTSIDE.grad}))
    assert_near(found[1], found[0])
    assert "LlamaMLP" in in_rows(ours) and why in whole(ours)["Own"]
    assert whole(ours)["Own"] in caplog.text and whole(ours)["Own"] in str(report)
    assert ours.model.layers[1].mlp.count == len(mlp.all)  # not more often than it keeps


def switched(mlp, x, module):
    return mlp(x - x.mean(1, keepdim=True)) if module.is_on or (x.abs() > module.most).any() else mlp(x)


@pytest.mark.parametrize("by", ["an attribute", "data", "data of one sequence"])
def test_what_mixes_rows_from_some_step_on_runs_whole_from_then_on(by):
    stock = llama(switched)
    for layer in stock.model.layers:
        layer.mlp.is_on, layer.mlp.most = False, 1e4
    ours = patched_copy(stock, tiles=TILE)
    batch = batch_of(stock)
    assert_near(step(ours, batch), step(stock, batch))
    assert "Own" in in_rows(ours)
    for model in (stock, ours):
        if by == "an attribute":
            model.model.layers[1].mlp.is_on = True
        else:
            model.model.layers[1].post_attention_layernorm.weight.data.mul_(1e5 if by == "data" else 1e4)
    assert_near(step(ours, batch), step(stock, batch))
    assert "Own" in whole(ours)


def test_a_call_that_turned_out_to_mix_rows_runs_again_as_it_ran():
    """Whole; and one before it in rows, though its backward comes later."""
    stock = llama(lambda mlp, x, m: switched(mlp, x + 0, m))
    for layer in stock.model.layers:
        layer.post_attention_layernorm = nn.Identity()
        layer.mlp.is_on, layer.mlp.most = False, 1e4
    ours, found = patched_copy(stock, tiles=TILE), []
    for model in (stock, ours):
        batch = batch_of(model)
        first = model(**batch).loss
        inputs = model.get_input_embeddings()(batch.pop("input_ids")) * 1e6
        found.append(backward(model, first + model(inputs_embeds=inputs, **batch).loss))
    assert_near(found[1], found[0])
    assert "Own" in in_rows(ours) | whole(ours).keys()


def test_attributes_set_in_the_first_call_and_inputs_without_a_gradient():
    def run(mlp, x, module):
        module.dtype = x.dtype
        return mlp(x.detach())

    stock = llama(run)
    ours = patched_copy(stock, tiles=TILE)
    for _ in range(2):
        assert_near(step(ours, batch_of(stock)), step(stock, batch_of(stock)))
    assert "Own" in in_rows(ours) and "keeps" in whole(ours)["Own"]


def test_a_batch_with_inf_changes_nothing_for_the_next_one():
    model = patched(model_of(), tiles=TILE)
    inputs = torch.randn(2, SIZE.seq, SIZE.hidden)
    for value in (1.0, torch.inf, 1.0):
        inputs[0, 40, 3] = value
        model(inputs_embeds=inputs, use_cache=False).logits.sum().backward()
    assert in_rows(model) == FAMILIES["llama"][1] and not whole(model)


def test_experts_of_a_limited_capacity_run_whole():
    """As many tokens as no part has."""
    config = transformers.SwitchTransformersConfig(
        vocab_size=512, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, num_experts=4,
        expert_capacity=64, router_jitter_noise=0.0, dropout_rate=0.0, decoder_start_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    stock = transformers.SwitchTransformersForConditionalGeneration(config).double().train()
    ids = torch.randint(1, 512, (2, 400))
    ours, batch = patched_copy(stock, tiles=16), {"input_ids": ids, "labels": ids[:, :64].contiguous()}
    for _ in range(2):
        assert_near(step(ours, batch), step(stock, batch), 1e-7)


def test_hooks_on_all_modules_see_what_they_see_in_stock():
    model, seen = model_of(), []
    patch(model, tiles=TILE)
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(type(module).__name__))
    try:
        step(model, batch_of(model))
    finally:
        hook.remove()
    assert seen.count("SiLUActivation") == 4 and not in_rows(model)


def test_code_that_fails_on_some_rows_runs_whole_with_stocks_masks():
    """Those of a dropout before it were drawn already."""

    def run(mlp, x, _):
        y = F.dropout(mlp(x), 0.3, True)
        return y if x.shape[1] != 48 else y.reshape(-1, 5)

    stock = llama(run)
    ours = patched_copy(stock, tiles=24)
    assert_near(step(ours, batch_of(stock)), step(stock, batch_of(stock)))
    assert "fails on some rows" in whole(ours)["Own"]


def test_hooks_and_weights_that_come_and_go_are_named():
    model = model_of()
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: None)
    assert_whole(model, {"LlamaMLP"}, "hooks", are_some=True)
    model = model_of()
    for parameter in model.parameters():
        parameter.ds_id = 0
    assert_whole(model, {"LlamaMLP", "LlamaRMSNorm"}, "ZeRO-3")
    mamba = transformers.MambaConfig(vocab_size=512, hidden_size=32, num_hidden_layers=1, state_size=4)
    assert_whole(transformers.MambaForCausalLM(mamba).train(), set(), "")


def assert_whole(model, names, why, are_some=False):
    batch = batch_of(model)
    expected = step(model, batch)
    patch(model, tiles=TILE)
    assert_near(step(model, batch), expected, 2e-6)
    assert set(whole(model)) >= names and (are_some or not names & in_rows(model))
    assert all(any(word in whole(model)[name] for word in why.split("|")) for name in names)


# The norm between blocks and head


def norm_of(model):
    return model.decoder.final_layer_norm if hasattr(model, "decoder") else model.model.norm


def with_norm(family="llama", dtype=torch.float32, is_frozen=False):
    model = accuracy.lm(family, dtype)
    norm = norm_of(model)
    with torch.no_grad():
        norm.weight.add_(0.3 * torch.randn_like(norm.weight))
    norm.weight.requires_grad_(not is_frozen)
    return model


def is_in_rows(model):
    return "" in reasons(norm_of(model))


@pytest.fixture
def logits_fit(monkeypatch):
    """Chunks in which all logits fit, and a quarter of the copies that a norm makes."""
    monkeypatch.setattr(chunked_loss, "CHUNK", 2**18)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunked_loss, "CHUNK", accuracy.SMALL)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "autocast"])
@pytest.mark.parametrize("family", ["llama", "gemma", "t5-decoder"])
def test_a_frozen_norm_has_stocks_bits_in_all_that_it_gives(family, mode, logits_fit):
    stock = with_norm(family, torch.bfloat16 if mode == "bf16" else torch.float32, is_frozen=True)
    batch, found = batch_for(stock, accuracy.LONG), []
    for model in (stock, patched_copy(stock, checkpoint="block")):
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            out, gradients = accuracy.step(model, batch)
        found.append([out.loss, out.logits, *(g for g in gradients if g is not None)])
    assert is_in_rows(model) and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_norm_that_trains_is_stocks_own_while_its_copies_fit_in_a_chunk(logits_fit):
    model = with_norm()
    batch = batch_for(model, accuracy.LONG)
    _, expected = accuracy.step(model, batch)
    patch(model, checkpoint="block")
    assert all(map(torch.equal, accuracy.step(model, batch)[1], expected))
    assert not is_in_rows(model)


def of_hidden(model, batch):
    """The gradient of what the norm gives, in two ways, and of what goes into it."""
    out = model(**batch, output_hidden_states=True)
    y = out.hidden_states[-1]
    y.retain_grad()
    (out.loss + y.square().mean()).backward(retain_graph=True)
    return [y.grad, *torch.autograd.grad(out.loss, out.hidden_states[-2:])]


def twice(model, batch):
    weights = [norm_of(model).weight, model.model.layers[-1].mlp.down_proj.weight]
    y = model(**batch, output_hidden_states=True).hidden_states[-1]
    first = torch.autograd.grad(y.square().mean(), weights, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), weights)


def doubled_in_place(model, batch):
    hook = norm_of(model).register_forward_hook(lambda module, args, out: out.mul_(2))
    step(model, batch)
    hook.remove()
    return []


@pytest.mark.parametrize("use", [of_hidden, twice, doubled_in_place])
def test_who_asks_for_other_gradients_of_the_norm_gets_stocks(use, small_chunks):
    stock, found = with_norm(), []
    batch = batch_for(stock, accuracy.LONG)
    for model in (stock, patched_copy(stock, checkpoint="block")):
        given = use(model, batch)
        found.append([*given, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert is_in_rows(model)
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-7)


class PlaceNorm(nn.Module):
    """Has a weight for each token."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone().expand(accuracy.LONG.seq, -1))

    def forward(self, x):
        return self.weight * x


class HeldNorm(nn.Module):
    """Holds its weight where nothing tells, or ``is_shared``, as an attribute: FSDP1's view of one not its own."""

    def __init__(self, weight, is_shared=False):
        super().__init__()
        self.flat = [nn.Parameter(weight.detach().clone())]
        self.weight = self.flat[0].view(-1) if is_shared else None

    def forward(self, x):
        return (self.flat[0] if self.weight is None else self.weight) * x


@pytest.mark.parametrize("kind", [PlaceNorm, HeldNorm, lambda weight: HeldNorm(weight, True)])
def test_what_rows_would_change_of_a_norm_stays_stocks(kind, small_chunks):
    model = accuracy.lm("llama")
    model.model.norm = kind(model.model.norm.weight)
    batch, found = batch_for(model, accuracy.LONG), []
    for is_patched in (False, True):
        if is_patched:
            patch(model, checkpoint="block")
        _, gradients = accuracy.step(model, batch)
        found.append([*gradients, *(p.grad for p in getattr(model.model.norm, "flat", ()))])
    assert not is_in_rows(model) and reasons(model.model.norm)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-7)


def test_kept_is_the_input_of_each_block_and_states_of_dropouts():
    model = model_of("gpt2", attn_pdrop=0.0)
    batch = batch_of(model)
    patch(model, tiles=TILE)
    step(model, batch)
    by_module = measure_kept(model, batch).by_module
    kept = sum(nbytes for name, nbytes in by_module.items() if name.startswith("transformer.h"))
    assert 2 * SIZE.u(4) < kept <= 2 * SIZE.u(4) + 2 * 2 * 5056 + 1024, by_module  # an MLP's dropout, and the block's


def test_the_norm_keeps_no_byte_more(monkeypatch):
    """Of what follows it, a head that wants the norm's output included."""
    kept = []
    for chunk in (2**40, 2**18):
        monkeypatch.setattr(chunked_loss, "CHUNK", chunk)
        model = patched(with_norm(is_frozen=True), checkpoint="block")
        kept.append(measure_kept(model, batch_for(model, accuracy.LONG)).total)
    assert is_in_rows(model) and kept[1] <= kept[0]


@pytest.mark.long
def test_from_the_loss_to_the_last_block_a_step_peaks_at_its_gradients_and_one_chunk():
    """In bf16, in u of that: 10.0 by stock's norm. The loss's gradient, times a number, that of x, 16 MiB of rows."""
    tokens, seen = 2**14, []
    fields = dict(intermediate_size=32, num_key_value_heads=4, vocab_size=4096, max_position_embeddings=tokens)
    model = build("llama", Size(hidden=256, layers=1), torch.bfloat16, **fields)
    for parameter in (model.model.norm.weight, model.lm_head.weight):
        parameter.requires_grad_(False)
    patch(model, checkpoint="block")
    model.model.layers[-1].register_forward_hook(lambda module, args, out: seen.append(out))
    ids = torch.randint(0, 4096, (1, tokens))
    loss = model(input_ids=ids, labels=ids).loss
    found = count_peak(lambda: torch.autograd.grad(loss, seen))
    u = tokens * 256 * 2
    assert found.peak <= 2 * u + chunked_loss.CHUNK // 8 + 0.2 * u


@pytest.mark.long
@pytest.mark.parametrize(("kind", "tile", "bar"), [("full", 128, 15.0), ("lora", 96, 14.0)])
def test_a_whole_step_takes_no_more_than_inputs_of_blocks_and_some_rows(kind, tile, bar, monkeypatch):
    """1/8 of 8192 tokens and of a width of 512, in hidden states: stock's checkpointing takes 33.8 and 53.7."""
    monkeypatch.setattr(chunked_loss, "CHUNK", chunked_loss.CHUNK // 64)
    model = model_of(
        num_hidden_layers=4, hidden_size=64, intermediate_size=224, num_attention_heads=8, vocab_size=32,
        max_position_embeddings=1024,
    )  # fmt: skip
    if kind == "lora":
        model = lora(model.to(torch.bfloat16), 0.0, r=1)
    patch(model, tiles=tile)
    ids = torch.randint(0, 32, (1, 1024))

    def run():
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    run()
    u = 1024 * 64 * model.get_input_embeddings().weight.itemsize
    assert count_peak(run).peak / u <= bar and {"LlamaMLP", "LlamaRMSNorm"} <= in_rows(model)
    if kind == "full":
        patch(model, tiles=tile // 2, replace=True)
        run()
        assert count_peak(run).peak / u < bar - 1  # no part outlives its turn
