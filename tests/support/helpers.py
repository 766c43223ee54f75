"""What the tests of single ops share: comparison to the bit, one forward and backward, and the meter on one op."""

import contextlib
import functools
import gc
import os
import weakref
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from hf_memsave.count.kept import live_tensors, measure_kept, storages
from hf_memsave.measure.private import why_not
from hf_memsave.patching.swap import Patch, patched_class, set_class
from hf_memsave.tape import Tape, table_without
from hf_memsave.tape.content import Content
from hf_memsave.tape.frame import Frame

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

#: Marks of a combination of settings that is left to `make matrix`, as others like it are always tested.
MATRIX = (pytest.mark.long, pytest.mark.matrix)


def thinned(every, *axes):
    """Every combination, but one of ``every`` left to `make matrix`.

    Each value of an axis stays where another axis has ``every`` values or more; of three axes, halved, each pair.
    """
    found = []
    for places in product(*(enumerate(axis) for axis in axes)):
        case = [value for _, value in places]
        found.append(pytest.param(*case, marks=MATRIX if sum(place for place, _ in places) % every else ()))
    return found


halved = functools.partial(thinned, 2)


def chosen(cases, some):
    """Every case, but those whose first values are not ``some`` left to `make matrix`."""
    return [pytest.param(*case, marks=() if case[0] in some or case[:2] in some else MATRIX) for case in cases]


#: Ways to hand an op an input that is not contiguous: a name, and a view of a leaf.
LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1), "sliced": lambda x: x[..., ::2],
    "expanded": lambda x: x[:1].expand(3, *x.shape[1:]), "offset": lambda x: x[1:, 1:],
}  # fmt: skip
#: The claim that the environment wants tested on a GPU too, which a test gives to ``only_on_cpu``.
CLAIM_ON_GPU = "CLAIM_ON_GPU"
BITS, BYTES = "equality to the bit", "this count of bytes"


def fix_kernels(fixed):
    """Whether the same call gives the same bits on a GPU."""
    torch.use_deterministic_algorithms(fixed, warn_only=True)
    for kernel in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(not fixed)


def only_on_cpu(device, claim=BITS):
    """Skip a test of what is claimed on CPU only, or have it run on a GPU on whose kernels it may hold."""
    if device.type != "cpu" and os.environ.get(CLAIM_ON_GPU) == claim:
        fix_kernels(claim == BITS)
    elif device.type != "cpu":
        pytest.skip(f"{claim} is claimed on CPU only")


def on_cpu_alone(claim=BITS):
    """A fixture of a file whose tests are all of what is claimed on CPU only."""
    return pytest.fixture(autouse=True)(lambda device: only_on_cpu(device, claim))


#: Of tests that open the stand-in for a CUDA device throughout.
on_stand_in = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def of_layers(kept):
    """Bytes but for cosines and sines, one table for all: with Transformers 5.24 two layers free it, four do not."""
    return sum(storage.nbytes for storage in kept.storages if not storage.module.endswith("rotary_emb"))


def taping(*stock, **options):
    """A tape as a patched model lays it, without these kinds."""
    fields = {name: options.pop(name) for name in Frame._fields if name in options}
    return Tape(Frame(table_without(*stock), **fields), **options)


def laid(tape):
    """A tape for True, none for False, or the one that ``tape`` makes."""
    if callable(tape):
        return tape()
    return taping() if tape else contextlib.nullcontext()


#: Contents to remake that other tests hold, and :func:`nodes` leaves out.
EARLIER = weakref.WeakSet()


def is_remade(handle):
    """Whether what lies on the tape is remade in backward, and not kept."""
    content = getattr(handle, "content", handle)
    return type(content) is Content and content.make is not None and not content.is_handed_on


def nodes():
    """To remake, alive now; PyTorch's engine holds what an error left of a backward until this thread's next one."""
    torch.ones((), requires_grad=True).square().backward()
    gc.collect()
    return [o for o in gc.get_objects() if type(o) is Content and is_remade(o) and o not in EARLIER]


def subsets(count):
    """Every choice of which of ``count`` inputs want a gradient."""
    return list(product((True, False), repeat=count))


def random(*shape, dtype=torch.float32, device="cpu", seed=0):
    """Normal numbers; the same on every device."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(device, dtype)


def bits(tensor):
    """The bytes of a floating-point tensor, as integers: tells -0 from 0, and equals NaN with itself."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(integers[tensor.itemsize])


def assert_same_bits(got, expected, what="tensor"):
    """Same dtype, same shape, and same bits; or both None."""
    if got is None or expected is None:
        assert got is expected, f"{what}: got {got}, expected {expected}"
        return
    assert got.dtype == expected.dtype, f"{what}: got {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: got {tuple(got.shape)}, expected {tuple(expected.shape)}"
    differ = bits(got) != bits(expected)
    assert not differ.any(), (
        f"{what}: {int(differ.sum())} of {got.numel()} elements differ, "
        f"by up to {(got.double() - expected.double()).abs().max().item()}"
    )


class Result(NamedTuple):
    """A forward and a backward: the op's output, the consumer's gradient, and those of the op's own tensors."""

    output: Tensor
    of_consumer: Tensor
    of_inputs: tuple[Tensor | None, ...]


def run(fn, inputs, wanted=None, tape=False, autocast=None, seed=7):
    """``fn(*inputs)``, one product that keeps its output, and a backward.

    The first input is an activation, and so no leaf (autocast casts a leaf once for all its consumers); the others are
    leaves. The product's gradient is the output that backward saw, times a constant: a wrong recomputation shows in
    each of its elements.
    """
    leaves = [x.detach().clone().requires_grad_(w) for x, w in zip(inputs, wanted or [True] * len(inputs), strict=True)]
    device = inputs[0].device
    torch.manual_seed(seed)
    with laid(tape), autocasting(device, autocast):
        output = fn(leaves[0] * 1, *leaves[1:])
        weight = random(*output.shape, dtype=output.dtype, device=device, seed=1).requires_grad_()
        product = output * weight
    product.backward(random(*product.shape, dtype=product.dtype, device=device, seed=2))
    return Result(output, weight.grad, tuple(x.grad for x in leaves))


def then_draws(fn):
    """``fn``, and in its result what the generator gives next."""

    def call(*given):
        out = fn(*given)
        return out + torch.rand(out.shape, device=out.device).to(out.dtype)

    return call


def autocasting(device, dtype):
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def layout(tensor):
    """The strides that count: those of dimensions longer than one."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def assert_same_result(got, expected):
    assert_same_bits(got.output, expected.output, "output")
    assert layout(got.output) == layout(expected.output), "the output lies in memory in another order"
    assert_same_bits(got.of_consumer, expected.of_consumer, "gradient of the consumer")
    for i, (mine, stock) in enumerate(zip(got.of_inputs, expected.of_inputs, strict=True)):
        assert_same_bits(mine, stock, f"gradient of input {i}")


def assert_exact(op, reference, inputs, tape=True, **options):
    assert_same_result(run(op, inputs, tape=tape, **options), run(reference, inputs, **options))


def taped(fn, tape=True):
    """``fn`` and a consumer that keeps its output, under a tape; for ``gradcheck``."""

    def under_tape(*inputs):
        with laid(tape):
            return fn(*inputs).square()

    return under_tape


def assert_gradients_are_right(fn, *inputs, twice=True, tape=True):
    """``gradcheck`` and ``gradgradcheck`` under a tape; the inputs are float64."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(taped(fn, tape), leaves)
    if twice:
        assert torch.autograd.gradgradcheck(taped(fn, tape), leaves)


def assert_backward_twice(fn, *inputs, tape=True):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    loss = taped(fn, tape)(*leaves).sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    for mine, before in zip(second, first, strict=True):
        assert_same_bits(mine, before)


def swapped(module, op, value=True):
    """``module`` itself, running ``op`` where a tape is laid."""
    set_class(module, patched_class(Patch(type(module), op=op, value=value)))
    return module


def as_function(module):
    """``module`` as a function of its input and then of each of its parameters."""
    names = [name for name, _ in module.named_parameters()]

    def call(x, *parameters):
        return functional_call(module, dict(zip(names, parameters, strict=True)), (x,))

    return call


class Calls(nn.Module):
    """A module of a function, and of the modules that it calls."""

    def __init__(self, fn, *parts):
        super().__init__()
        self.fn = fn
        if parts:
            self.parts = nn.ModuleList(parts)

    def forward(self, *args, **kwargs):
        return self.fn(*args, **kwargs)


class GoesBack(torch.autograd.Function):
    """The identity, whose backward gives what ``fn`` makes of the gradient."""

    @staticmethod
    def forward(ctx, x, fn):
        ctx.fn = fn
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return ctx.fn(dy), None


class Probe(Calls):
    """An op and what consumes its output, under a tape or not; the meter sees all that they keep.

    ``torch.clone`` as ``producer`` of its input keeps nothing, so the input counts if the op keeps it;
    ``torch.sigmoid`` keeps its output, so the input is kept whatever the op does. Autocast ends with the forward.
    """

    def __init__(self, fn, tape, producer, linear, autocast):
        def forward(x):
            with laid(tape), autocasting(x.device, autocast):
                return {"loss": linear(fn(producer(x))).sum()}

        super().__init__(forward, *(part for part in (fn, linear) if isinstance(part, nn.Module)))


def kept(fn, x, tape, producer=torch.clone, linear=True, autocast=None):
    """Bytes that ``fn`` and the linear after it keep, wherever they hide; see :class:`Probe`."""
    with torch.no_grad(), autocasting(x.device, autocast):
        output = fn(x)
    after = nn.Linear(output.shape[-1], 2, dtype=output.dtype) if linear else nn.Identity()
    found = measure_kept(Probe(fn, tape, producer, after.to(x.device), autocast), x.detach().clone().requires_grad_())
    (loss,) = (s.nbytes for s in found.storages if s.op == "sum")
    return found.total - loss


def live_bytes():
    """Of every storage that Python can see, once."""
    gc.collect()
    return sum({s._cdata: s.nbytes() for s in storages(live_tensors())}.values())


def nbytes(*tensors):
    return sum(t.numel() * t.itemsize for t in tensors)


def generator_state(device):
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


class CopiesAsOnCuda(saved_tensors_hooks):
    """In place of ``save_on_cpu``, which pins memory, and so needs an accelerator: copies stand for main memory."""

    def __init__(self, **_):
        super().__init__(lambda x: (x.device, torch.empty_like(x).copy_(x)), lambda packed: packed[1].clone())
