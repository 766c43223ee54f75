"""Logits that are computed when they are read, and numbers of each row, a chunk of rows at a time, are stock's."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from hf_memsave import KeptTensorChangedError, PatchError, patch
from hf_memsave.count.peak import count_peak
from hf_memsave.ops.loss import chunked_loss
from hf_memsave.ops.loss.head import HeadCall
from hf_memsave.ops.loss.unread import Unread
from support.accuracy import SMALL, adapted, error, lm, softcapped
from support.steps import patched, patched_copy
from support.zoo import Size, batch_for, build

WORDS = 512


def flat(x):
    return x.view(-1, WORDS)


def of_chosen(x, ids):
    return x.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def beside_logsumexp(x, ids):
    return torch.gather(x, -1, ids.unsqueeze(-1)).squeeze(-1) - torch.logsumexp(x, dim=-1)


def entropy(x, ids):
    logp = F.log_softmax(x, dim=-1)
    return -(logp.exp() * logp).sum(-1)


def both(x, ids):
    """As GRPO with a bonus has it."""
    logp = torch.log_softmax(x.float() / 0.7, -1)
    return torch.gather(logp, 2, ids[..., None])[..., 0] - 0.1 * (logp.exp() * logp).sum(dim=-1)


def divided(x, ids):
    x.div_(0.7)
    return F.cross_entropy(x.transpose(1, 2), ids, reduction="none")


#: What is asked of logits, and how often they are computed: once for each number, and once in backward.
NUMBERS = {
    "log_softmax, gather": (of_chosen, 2), "gather, logsumexp": (beside_logsumexp, 3), "entropy": (entropy, 2),
    "both": (both, 3), "of other tokens": (lambda x, ids: beside_logsumexp(x[:, :-1], ids[:, 1:]), 3),
    "minus logsumexp": (lambda x, ids: of_chosen(x - x.logsumexp(-1, keepdim=True), ids), 4),
    "logsumexp, p z": (lambda x, ids: x.logsumexp(-1) - (x.softmax(-1) * x).sum(-1), 3), "divided": (divided, 2),
    "words": (lambda x, ids: of_chosen(x.masked_fill(torch.arange(WORDS) < 9, -1e4), ids.clamp(min=9)), 2),
    "cross-entropy by token": (lambda x, ids: F.cross_entropy(flat(x), ids.view(-1), reduction="none"), 2),
    "nll_loss": (lambda x, ids: F.nll_loss(flat(x).log_softmax(-1), ids.view(-1)), 2),
    "TRL's": (partial(selective_log_softmax, temperature=0.9), 3),
    "TRL's entropy": (lambda x, ids: entropy_from_logits(x, 7), 2),
}  # fmt: skip


@pytest.fixture
def rows(monkeypatch):
    counted, stock = [], HeadCall.logits
    monkeypatch.setattr(HeadCall, "logits", lambda self, x, **chunk: counted.append(len(x)) or stock(self, x, **chunk))
    return counted


def asked(model, **options):
    batch = batch_for(model, Size())
    labels = batch.pop("labels")
    return model(**batch, **options).logits, labels


def run(model, ask, mode="fp32"):
    """What is asked, and the gradients of its square."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
        logits, ids = asked(model)
        out = ask(logits, ids)
        loss = out.square().mean()
    loss.backward()
    return logits, out.detach(), [p.grad.clone() for p in model.parameters() if p.requires_grad]


CASES = {"llama": (lambda: lm("llama"), NUMBERS), "softcap": (softcapped, ["both"]), "LoRA": (adapted, NUMBERS)}


@pytest.mark.long
@pytest.mark.parametrize(("make", "names"), CASES.values(), ids=CASES)
def test_what_is_asked_of_each_row_is_stocks(make, names, small_chunks, rows):
    stock = make()
    ours, exact = patched_copy(stock), copy.deepcopy(stock).double()
    for name in names:
        ask, times = NUMBERS[name]
        _, expected, of_stock = run(stock, ask)
        truth = run(exact, ask)[2]
        rows.clear()
        logits, found, gradients = run(ours, ask)
        assert type(logits) is Unread and not logits.is_read(), name
        assert sum(rows) <= times * 32, name
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5, msg=name)
        assert error(gradients, truth) <= 1.5 * error(of_stock, truth) + 2e-6, name


@pytest.mark.parametrize("mode", ["bf16", "autocast"])
def test_in_low_precision_too(mode, small_chunks):
    stock = lm("llama", torch.bfloat16 if mode == "bf16" else torch.float32)
    ours, exact = patched_copy(stock), copy.deepcopy(stock).double()
    for name in ("log_softmax, gather", "gather, logsumexp", "both", "cross-entropy by token", "TRL's"):
        ask = NUMBERS[name][0]
        _, expected, of_stock = run(stock, ask, mode)
        truth = run(exact, ask)[2]
        logits, found, gradients = run(ours, ask, mode)
        assert not logits.is_read() and found.dtype == expected.dtype, name
        torch.testing.assert_close(found, expected, rtol=0.01, atol=0.02, msg=name)
        assert error(gradients, truth) <= 1.1 * error(of_stock, truth), name


def dpo(model, ids, ask):
    """A step, whose reference is the model itself without a gradient."""
    found = []
    for has_gradient in (False, True):
        with torch.set_grad_enabled(has_gradient):
            found.append(ask(model(input_ids=ids).logits, ids).sum(-1))
    reference, policy = found
    first, second = policy - reference + torch.tensor([0.2, 0.0])
    F.logsigmoid(first - second).neg().backward()


def shifted(ask):
    return lambda x, ids: ask(x[:, :-1], ids[:, 1:])


#: What a step peaks at, at most, over stock's.
PEAKS = {ask.__name__: (shifted(ask), 0.15) for ask in (of_chosen, beside_logsumexp, entropy, both)}
PEAKS |= {
    "flat": (shifted(lambda x, ids: F.cross_entropy(x.reshape(-1, 4000), ids.reshape(-1), reduction="none")), 0.3),
    "transposed": (shifted(lambda x, ids: F.cross_entropy(x.transpose(1, 2), ids, reduction="none")), 0.3),
    "divided": (divided, 0.3),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="figures are those of CPU kernels")
@pytest.mark.parametrize(("ask", "part"), PEAKS.values(), ids=PEAKS)
def test_a_steps_peak_is_a_fraction_of_stocks(ask, part, monkeypatch):
    """Of 32,000 words and 2,048 tokens, words, tokens and chunks divided by 8, 4 and 16."""
    monkeypatch.setattr(chunked_loss, "CHUNK", chunked_loss.CHUNK // 16)
    size = Size(hidden=16, heads=2, layers=1)
    stock = build("llama", size, intermediate_size=32, num_key_value_heads=2, vocab_size=4_000)
    ours, ids, peaks = patched_copy(stock), torch.randint(0, 4_000, (2, 512)), []
    for model in (stock, ours):
        dpo(model, ids[:, :4], ask)
        model.zero_grad()
        peaks.append(count_peak(lambda model=model: dpo(model, ids, ask)).peak)
    assert peaks[1] <= part * peaks[0]


@pytest.fixture
def ours(small_chunks):
    model = patched(lm("llama"))
    return model


READS = {
    "clone": lambda x: x.clone(), "numpy": lambda x: torch.tensor(x.detach().numpy()), "matmul": lambda x: x @ x.mT,
    "item": lambda x: torch.tensor(x[0, 0, 0].item()), "list": lambda x: torch.tensor(x.tolist()),
    "the last token, as float": lambda x: x[:, -1].float(), "other rows": lambda x: x.reshape(-1, 4),
    "scaled": lambda x: (x / 3.0).tanh() * 2, "deepcopy": lambda x: copy.deepcopy(x.detach()),
    "nested": lambda x: torch.nested.nested_tensor(list(x.detach())).to_padded_tensor(0.0),
}  # fmt: skip


def test_logits_that_are_read_have_stocks_bits_and_say_so_once(ours, caplog, monkeypatch):
    monkeypatch.setattr("hf_memsave.ops.loss.unread._told", set())
    caplog.set_level("INFO", "hf_memsave")
    stock = asked(lm("llama"))[0]
    for name, read in READS.items():
        logits = asked(ours)[0]
        assert type(logits) is Unread
        for found in (read(logits), read(logits)):
            found = found.clone() if isinstance(found, Unread) else found
            assert type(found) is torch.Tensor and torch.equal(found, read(stock)), name
    told = [record.message for record in caplog.records if "reads logits" in record.message]
    assert told.count("aten.view.default reads logits, or their gradient, whole: 64.00 KiB (said once)") == 1
    assert len(told) == len({message.split()[0] for message in told}) > 2


def test_in_a_checkpoint_and_in_a_function_of_ones_own(ours):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            return 2 * logits.amax()

        @staticmethod
        def backward(ctx, dy):
            return dy.expand(2, 16, WORDS) * 2

    for ask in (
        lambda x, ids: checkpoint(lambda x: both(x, ids), x, use_reentrant=False),
        lambda x, ids: Doubled.apply(x),
    ):
        _, expected, of_stock = run(lm("llama"), ask)
        _, found, gradients = run(ours, ask)
        torch.testing.assert_close([found, *gradients], [expected, *of_stock], rtol=1e-4, atol=1e-6)


def fused_step(model):
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.optim.AdamW(model.parameters(), 0.1, fused=True).step()


@pytest.mark.parametrize(
    "change",
    [fused_step, lambda model: model.lm_head.weight.data[3, 4].add_(1),
     lambda model: model.lm_head.weight.data.copy_(model.lm_head.weight.flip(0))],
    ids=["fused step", "write", "permute"],
)  # fmt: skip
def test_logits_read_after_weights_were_written_to_are_refused(change, ours):
    logits, ids = asked(ours)
    number, read = of_chosen(logits, ids), asked(ours)[0].clone()
    with torch.no_grad():
        old, _ = asked(ours)
    change(ours)
    for refused in (lambda: beside_logsumexp(old, ids), number.mean().backward, lambda: (logits + 1).std()):
        with pytest.raises(KeptTensorChangedError, match=r"weights have been written to, .*optimizer\.step\(\)\)"):
            refused()
    assert torch.equal(read, asked(lm("llama"))[0])


def test_hidden_states_or_labels_written_to_before_logits_are_read_are_refused(ours):
    batch = batch_for(ours, Size())
    labels = batch.pop("labels")
    out = ours(**batch, output_hidden_states=True)
    masked = out.logits.masked_fill((labels > 9)[..., None], 0.0)
    (dy,) = torch.autograd.grad(F.cross_entropy(out.logits.view(-1, WORDS), labels.view(-1)), out.logits)
    labels.fill_(3)
    with pytest.raises(KeptTensorChangedError, match="written to|modified"):
        dy.std()
    out.hidden_states[-1].data.mul_(2)
    with pytest.raises(KeptTensorChangedError, match=r"hidden states .* written to.* MemSaveConfig\(loss='stock'\)"):
        masked.std()


def loss_of(x, ids):
    return F.cross_entropy(flat(x), ids.view(-1))


def given(x, ids, other):
    """A gradient of these logits, or of a part, to those of another forward, or to another part."""
    (dy,) = torch.autograd.grad(loss_of(x, ids), x)
    other.backward(dy)


def to_another_part(x, ids, other):
    (dy,) = torch.autograd.grad(F.cross_entropy(x[:1].flatten(0, 1), ids[0]), x)
    x[1:].backward(dy[1:])


def of_no_rows(x, ids, other):
    none = x[:, :0]
    found = none.logsumexp(-1), none.exp(), F.cross_entropy(none.transpose(1, 2), ids[:, :0], reduction="none")
    (x.logsumexp(-1).sum() + F.cross_entropy(none.reshape(-1, WORDS), ids[:, :0].flatten(), reduction="sum")).backward()
    return [one.detach() for one in found]


def of_other_dtypes(x, ids, other):
    x = x.detach()
    return [torch.cat([x[:1] > 0, x[1:]]).sum(-1), torch.cat([x[:1] > 0, x[1:] > 0.05]) + 0, (x / 2).square_().sum(-1)]


def in_long_chains(x, ids, other):
    for _ in range(20):
        x = x + 0.1 * x.tanh()
    x.logsumexp(-1).sum().backward()


def in_inference_mode(x, ids, other):
    with torch.inference_mode():
        return [x[0].sum(-1).clone(), flat(x).logsumexp(-1).clone(), x[:, :-1].argmax(-1).clone()]


def in_transforms(x, ids, other):
    chosen = torch.func.vmap(lambda ids: of_chosen(x.detach(), ids))(torch.stack([ids, ids.flip(0)]))
    return [chosen, torch.func.grad(lambda x: loss_of(x, ids))(x.detach())]


USES = {
    "given": given, "to_another_part": to_another_part, "of no rows": of_no_rows, "of other dtypes": of_other_dtypes,
    "with a backward of all": lambda x, ids, other: (
        loss_of(x, torch.full_like(ids, -100)) + x.logsumexp(-1).square().mean()).backward(),
    "of words alone": lambda x, ids, other: (
        (x.log_softmax(-1) + 1).sum((0, 1)) * torch.arange(WORDS)).sum().backward(),
    "in long chains": in_long_chains, "in inference mode": in_inference_mode, "in transforms": in_transforms,
    "compiled": lambda x, ids, other: [torch.compile(lambda x: x.logsumexp(-1), backend="eager")(x.detach())],
}  # fmt: skip


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_what_else_is_done_with_them_is_as_in_stock(use, ours):
    found = []
    for model in (lm("llama"), ours):
        (x, ids), other = asked(model), model(input_ids=batch_for(model, Size())["input_ids"].flip(0)).logits
        out = use(x, ids, other) or []
        found.append([*out, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6, equal_nan=True)


def test_with_weights_given_to_one_call(ours):
    found = []
    for model in (lm("llama"), ours):
        new = {name: torch.nn.Parameter(p.detach() + 0.1) for name, p in model.named_parameters()}
        batch = {"input_ids": batch_for(model, Size())["input_ids"]}
        number = torch.func.functional_call(model, new, (), batch).logits.logsumexp(-1)
        found.append([number, *torch.autograd.grad(number.sum(), list(new.values()))])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "change", [lambda x: x.transpose_(1, 2), lambda x: setattr(x, "data", x + 1)], ids=["in place", "data"]
)
def test_what_would_change_their_memory_is_refused(change, ours):
    with pytest.raises(PatchError, match=r"Use another function, or MemSaveConfig\(loss='stock'\)"):
        change(asked(ours)[0].detach())


def test_several_gradients_at_once(small_chunks):
    found = []
    for model in (lm("llama"), patched_copy(lm("llama"))):
        logp = of_chosen(*asked(model)).mean(-1)
        wanted = [model.lm_head.weight, model.model.norm.weight]
        found.append(torch.autograd.grad(logp, wanted, torch.eye(2), is_grads_batched=True))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)


def test_a_gradients_gradient_is_refused(ours):
    logp = of_chosen(*asked(ours))
    (first,) = torch.autograd.grad(logp.mean(), [ours.lm_head.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_where_logits_are_stocks(ours, monkeypatch):
    """With labels, or for inference, where no gradient comes; and where they fit in one chunk."""
    batch = batch_for(ours, Size())
    with torch.no_grad():
        assert type(ours(**batch).logits) is torch.Tensor
        assert type(asked(ours)[0]) is Unread
    with torch.inference_mode():
        assert type(asked(ours)[0]) is torch.Tensor
    monkeypatch.setattr(chunked_loss, "CHUNK", 1000 * SMALL)
    assert type(asked(ours)[0]) is torch.Tensor
    with torch.no_grad():
        assert type(asked(ours)[0]) is torch.Tensor


def test_a_hook_on_the_head_is_given_logits(ours):
    seen = []
    ours.lm_head.register_forward_hook(lambda module, args, logits: seen.append(type(logits)))
    assert type(asked(ours)[0]) is torch.Tensor
    assert seen == [torch.Tensor]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_labels_that_stock_refuses_are_refused(dtype, ours):
    batch = batch_for(ours, Size())
    with pytest.raises(RuntimeError, match="expected target dtype|expected scalar type Long"):
        ours(**batch | {"labels": batch["labels"].to(dtype)})


@pytest.mark.long
@pytest.mark.parametrize(("tokens", "kind"), [(16, torch.Tensor), (256, Unread)])
def test_few_tokens_of_a_large_head_are_not_worth_its_sums(tokens, kind, monkeypatch):
    """But in half precision, where a plain head needs none."""
    monkeypatch.setattr(chunked_loss, "CHUNK", 8192)
    size = Size(hidden=256, seq=tokens, batch=1)
    for dtype in (torch.float32, torch.bfloat16):
        model = patched(build("llama", size, dtype, dropout=0.0))
        assert type(model(**batch_for(model, size)).logits) is (Unread if dtype.itemsize == 2 else kind)
        model = build("llama", size, dtype, dropout=0.0)
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])).train()
        patch(model)
        assert type(model(**batch_for(model, size)).logits) is kind
