"""Several views of one storage in a checkpointed block: each goes to the checkpoint by itself.

Were one packed for all of them, each of these would raise or differ: the second run may end before the others are
written, or have them on another storage.
"""

import contextlib
import functools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from support.attacks import assert_alike
from support.helpers import random
from support.program_ops import Scribble

SIZE = 8


class Block(nn.Module):
    """Two views of one product of the input, in what ``fn(block, x, a, b)`` makes of them."""

    def __init__(self, fn):
        super().__init__()
        self.fn, self.linear = fn, nn.Linear(SIZE, 2 * SIZE)
        self.q, self.k = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(2))
        self.weight, self.other = nn.Parameter(random(SIZE)), nn.Parameter(random(2 * SIZE))
        self.table = None

    def forward(self, x):
        made = self.linear(x)
        return self.fn(self, x, made, *made.tensor_split(2, -1))


def unsafe_chunks(block, x, made, a, b):
    """Each has a version of its own."""
    a, b = torch.unsafe_chunk(made, 2, -1)
    return a.sigmoid_() + b.tanh_()


class Filled(torch.autograd.Function):
    """A kernel fills a row of a buffer, which no version tells, and keeps it."""

    @staticmethod
    def forward(ctx, x, buffer, i):
        buffer.numpy()[i] = i + 2
        ctx.save_for_backward(buffer[i])
        return x * buffer[i]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None, None


def rows_filled_by_a_kernel(block, x, made, a, b):
    buffer = torch.empty(4, SIZE).fill_(0)  # zeros() would be made again: see limits.md
    return sum(Filled.apply(block.weight, buffer, i) for i in range(4)) + a


def sums_of_squares(block, x, made, a, b):
    """Each operation keeps what has one shape, so that nothing else tells them apart."""
    sums = ((made[..., :SIZE] ** 2 + made[..., SIZE:] ** 2).cumsum(-1) ** 2).cumsum(0)
    return sums**2


def laid_out_as_the_input(block, x, made, a, b):
    sums = x + x.cumsum(-1)
    return sums[0, 0] * block.weight + sums[0, 1] * block.other[:SIZE] + sums[1, 2]


def beside_the_input(block, x, made, a, b):
    """Views of the storage that the input lies on, by an attribute."""
    c, d = block.table.chunk(2, -1)
    return (c * block.weight[: SIZE // 2] + d * block.weight[SIZE // 2 :]).exp().sum() + x * block.weight


def adapter_reads_before_a_write(block, x, made, a, b):
    sums, y = a * a.cumsum(-1), block.q(b)
    b.mul_(2)
    return y * sums + b


def losing_strides():
    """As ``save_on_cpu(pin_memory=True)`` does on CUDA: what comes back lies in another way, on its own storage."""
    return saved_tensors_hooks(lambda t: torch.empty(t.shape, dtype=t.dtype).copy_(t), torch.clone)


def save_first_view(_, op, *args, **kwargs):
    is_first = op is torch.ops.aten.slice.Tensor and args[2] == 0
    return CheckpointPolicy.MUST_SAVE if is_first else CheckpointPolicy.MUST_RECOMPUTE


SAVES_ONE_VIEW = functools.partial(create_selective_checkpoint_contexts, save_first_view)


def gradients(block, is_transposed=False, is_split=False, **settings):
    inputs = random(3, 5, SIZE if not is_split else 2 * SIZE).requires_grad_()
    x = (inputs * 1).transpose(0, 1) if is_transposed else inputs * 1
    if is_split:
        x, block.table = x.chunk(2, -1)
    dtype = next(block.parameters()).dtype
    with losing_strides() if is_transposed or is_split else contextlib.nullcontext():
        out = checkpoint(block, x.to(dtype), use_reentrant=False, **settings)
    trained = [p for p in block.parameters() if p.requires_grad]
    return torch.autograd.grad(out.float().sum(), [inputs, *trained], allow_unused=True)


CASES = {
    "chunks with versions of their own": (unsafe_chunks, {}),
    "rows filled by a kernel": (rows_filled_by_a_kernel, {}),
    "a view that selective checkpointing saves": (sums_of_squares, {"context_fn": SAVES_ONE_VIEW}),
    "written to by a backward": (lambda block, x, made, a, b: Scribble.apply(a) + Scribble.apply(b) * block.weight, {}),
    "laid out as an input whose strides a hook loses": (laid_out_as_the_input, {"is_transposed": True}),
    "of the storage that an input lies on": (beside_the_input, {"is_split": True}),
}


@pytest.mark.parametrize(("fn", "how"), CASES.values(), ids=CASES)
def test_views_of_one_storage_in_a_checkpointed_block_are_stocks(fn, how):
    assert_alike(lambda: Block(fn), lambda block: [gradients(block, **how) for _ in range(2)])


def test_a_view_that_an_adapter_has_read_is_written_to_beside_another_that_is_kept():
    def make():
        block = Block(adapter_reads_before_a_write).bfloat16()
        lora = LoraConfig(r=2, target_modules=["q", "k"], init_lora_weights=False)
        return get_peft_model(block, lora).base_model.model

    assert_alike(make, lambda block: [gradients(block) for _ in range(2)])


def test_a_table_of_two_views_grows_before_the_backward_of_a_shorter_forward():
    """As a cache of cosines and sines does."""

    def rotated(block, x, made, a, b):
        length = x.shape[1]
        if block.table is None or block.table.shape[1] < length:
            angles = torch.outer(torch.arange(length).float(), torch.arange(SIZE).float())
            block.table = torch.stack([angles.cos(), angles.sin()])
        cos, sin = block.table[:, :length]
        return a * cos + a.flip(-1) * sin

    def both(block):
        block.table = None
        outs = [checkpoint(block, random(2, n, SIZE).requires_grad_(), use_reentrant=False).sum() for n in (4, 9)]
        return torch.autograd.grad(outs[0] * outs[1], [*block.linear.parameters()])

    assert_alike(lambda: Block(rotated), both)
