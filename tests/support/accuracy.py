"""How near a patched model's gradients are to float64, beside stock's."""

import contextlib
import copy
from functools import partial

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model

from hf_memsave import patch
from hf_memsave.ops.loss.head import HeadCall
from hf_memsave.ops.loss.unread import Unread, unread_logits
from support.zoo import Size, batch_for, build

LONG = Size(seq=64)
#: Bytes of a chunk of eight rows of those models' logits: over fewer, BLAS sums less accurately.
SMALL = 50000


def lm(family, dtype=torch.float32, **more):
    return build(family, LONG, dtype, dropout=0.0, **more)


softcapped = partial(lm, "gemma2", final_logit_softcapping=5.0)
#: It multiplies its logits.
scaled = partial(lm, "cohere2", logit_scale=0.5)


def adapted(dtype=torch.float32, targets=("lm_head", "q_proj"), rank=8):
    """LLaMA with LoRA on its head, too."""
    config = LoraConfig(r=rank, target_modules=list(targets), init_lora_weights=False)
    return get_peft_model(lm("llama", dtype), config, autocast_adapter_dtype=False).train()


class OfLinear(torch.nn.Module):
    """A linear head of these tensors."""

    def __init__(self, weight, bias=None):
        super().__init__()
        self.given = [tensor for tensor in (weight, bias) if tensor is not None]

    def parameters(self, recurse=True):
        return iter(self.given)

    def forward(self, hidden):
        return F.linear(hidden, *self.given)


def unread(x, weight, bias=None, fuses_loss=False):
    """The logits of x by a linear head, not computed yet."""
    head = OfLinear(weight, bias)
    dtype = torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else x.dtype
    return unread_logits(HeadCall(head, head.forward, x, len(weight), fuses_loss=fuses_loss), x, dtype)


def step(model, batch, **options):
    model.zero_grad()
    out = model(**batch, **options)
    out.loss.backward()
    return out, [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def in_float64(model, batch, **options):
    return step(copy.deepcopy(model).double(), batch, **options)


def error(ours, exact):
    pairs = [(a.double(), b) for a, b in zip(ours, exact, strict=True) if b is not None]
    assert len(pairs) > 5
    return (sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)).sqrt().item()


def of_ours_over_stocks(make, context=None, draws=6, **options):
    """The distance of our gradients to float64, over that of stock's: the median over several models and batches."""
    found = ratios(make, context, draws, **options)
    assert found.max() < 1.05, found  # measured: 1.004
    return found.median().item()


def assert_as_near_as_stock(make, context=None, draws=24, **options):
    """In fp32 the ratio of one model and batch is .9 to 1.1, as the CPU's products round: its mean is what tells."""
    found = ratios(make, context, draws, **options).log()
    error_of_mean = found.std() / draws**0.5
    assert error_of_mean < 0.02
    assert found.mean() < 3 * error_of_mean


def ratios(make, context=None, draws=6, config=True, **options):
    found = []
    for seed in range(draws):
        model = make()
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        batch = batch_for(model, LONG, padded=True)
        batch["labels"] = batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0.2, -100)
        _, exact = in_float64(model, batch, **options)
        with context or contextlib.nullcontext():
            stock, of_stock = step(model, batch, **options)
            report = patch(model, config)
            out, ours = step(model, batch, **options)
        assert type(out.logits) is Unread
        assert "the loss ran in chunks" in str(report)
        assert (out.loss.dtype, out.logits.dtype) == (stock.loss.dtype, stock.logits.dtype)
        assert torch.allclose(out.loss, stock.loss, rtol=1e-6)
        assert torch.equal(out.logits, stock.logits)
        found.append(error(ours, exact) / error(of_stock, exact))
    return torch.tensor(found)
