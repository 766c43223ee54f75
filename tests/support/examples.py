"""Arguments for every function of the table of cheap functions: a new line of the table needs one here."""

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from support.helpers import random

SHAPE = (8, 20)


#: Tensors of :class:`Arguments`, each of the normal numbers of its own seed.
TENSORS = {
    "x": lambda normal: normal,
    "y": lambda normal: normal,
    "z": lambda normal: normal,
    "u": lambda normal: normal.sigmoid() * 0.8 + 0.1,
    "weight": lambda normal: normal,  # as long as the last dimension
    "bias": lambda normal: normal,
    "flag": lambda normal: normal > 0,
    "other_flag": lambda normal: normal > 0,
    "i": lambda normal: (normal * 5).long(),
    "j": lambda normal: (normal * 5).long().abs() + 1,
}


class Arguments:
    """Fresh tensors, made when asked for, the same each time; ``view`` sees what ``producer`` makes of leaves."""

    def __init__(self, device, dtype=torch.float32, frozen=False, view=None, producer=torch.clone):
        self.device, self.dtype, self.frozen, self.view, self.producer = device, dtype, frozen, view, producer
        self.leaves = []

    def __getattr__(self, name):
        if name not in TENSORS:
            raise AttributeError(name)
        is_vector = name in ("weight", "bias")
        normal = random(*((self.last,) if is_vector else SHAPE), seed=1 + list(TENSORS).index(name))
        tensor = TENSORS[name](normal).to(self.device)
        if tensor.is_floating_point():
            self.leaves.append(tensor.to(self.dtype).requires_grad_(not self.frozen))
            tensor = self.producer(self.leaves[-1])
        if self.view is not None and not is_vector:
            tensor = self.view(tensor)
        setattr(self, name, tensor)
        return tensor

    @property
    def last(self):
        return self.x.shape[-1]

    def normal(self, *shape):
        return random(*shape, dtype=self.dtype, device=self.device, seed=11)

    def indices(self, *numbers):
        return torch.tensor(numbers, device=self.device)


def of(names, *makes):
    return dict.fromkeys(names.split(), makes)


def x(a):
    return (a.x,)


def scaled(a):
    """Of PyTorch 2.15, without a kernel on CPU."""
    x, scale = a.normal(16, 16), [torch.ones((), device=a.device), F.ScalingType.TensorWise]
    return x, x.to(torch.float8_e4m3fn), x.to(torch.float8_e4m3fn).t(), *scale, *scale


def flag(a):
    return (a.flag,)


TWO = (lambda a: (a.x, a.y), lambda a: (a.x, a.weight), lambda a: (a.x, 2.0))
COMPARED = (lambda a: (a.x, a.y), lambda a: (a.x, 0.0))
FLAGS = (lambda a: (a.flag, a.other_flag),)
JOINED = (lambda a: ([a.x, a.y],), lambda a: ((a.x, a.x),))

#: Name -> ways to call it, each as the positional arguments; a dict at the end is keyword arguments.
EXAMPLES = {
    **of(
        "neg negative square exp exp2 expm1 sin cos sinh cosh tanh atan sigmoid erf erfc abs absolute sign floor ceil "
        "round trunc frac isinf isnan isfinite clone zeros_like ones_like sinc softsign tanhshrink logsigmoid "
        "log_sigmoid ravel relu asinh arcsinh arctan angle deg2rad rad2deg sgn signbit fix positive isposinf isneginf "
        "isreal i0 i0e ndtr expit fliplr flipud diag_embed selu celu mish hardswish hardsigmoid "
        "silu bool byte char short int long cfloat",
        x,
    ),
    **of("asin acos log log2 logit log10 tan erfinv arcsin arccos atanh arctanh lgamma gammaln digamma psi entr",
         lambda a: (a.u,)),
    **of("erfcx log_ndtr ndtri i1 i1e", lambda a: (a.u.float(),)),  # for which there are no kernels of 16 bits
    **of("log1p sqrt rsqrt reciprocal acosh arccosh", lambda a: (a.u + 1.5,)),
    **of("add sub subtract mul multiply div divide true_divide __rsub__ __rmul__ __radd__ __rdiv__ __rtruediv__ fmod "
         "remainder floor_divide __floordiv__ __rfloordiv__ __mod__ __rmod__ copysign", *TWO),
    **of("maximum minimum fmax fmin hypot atan2 arctan2 logaddexp logaddexp2", *TWO[:2]),
    **of("xlogy xlog1py", lambda a: (a.x, a.u), lambda a: (a.x, 2.0)),
    **of("heaviside nextafter ldexp isclose", lambda a: (a.x, a.y)),
    **of("float_power", lambda a: (a.x, 3), lambda a: (a.u, a.y)),
    **of("complex polar", lambda a: (a.x.float(), a.y.float())),
    **of("gcd lcm", lambda a: (a.i, a.j)),
    **of("rsub", lambda a: (a.x, a.y), lambda a: (a.x, 2.0), lambda a: (a.x, a.y, {"alpha": 0.5})),
    **of("pow __pow__", lambda a: (a.x, 3), lambda a: (a.u, a.y), lambda a: (a.x, 0.5)),
    **of("__rpow__", lambda a: (a.x, 2.0), lambda a: (a.y, a.u)),
    **of("gt lt ge le eq ne __eq__ greater less greater_equal less_equal not_equal", *COMPARED),
    **of("logical_and logical_or logical_xor __and__ __or__ __xor__ __rand__ __ror__ __rxor__", *FLAGS),
    **of("bitwise_and bitwise_or bitwise_xor", lambda a: (a.i, a.j), *FLAGS),
    **of("bitwise_left_shift bitwise_right_shift __lshift__ __rshift__", lambda a: (a.i, a.j), lambda a: (a.i, 2)),
    **of("__rlshift__ __rrshift__", lambda a: (a.j, 4096)),
    **of("logical_not __invert__", flag),
    **of("bitwise_not", flag, lambda a: (a.i,)),
    **of("gelu", x, lambda a: (a.x, {"approximate": "tanh"})),
    **of("elu", x, lambda a: (a.x, 0.7)),
    **of("softplus", x, lambda a: (a.x, 2.0, 5.0)),
    **of("hardshrink softshrink", x, lambda a: (a.x, 0.3)),
    **of("glu", lambda a: (a.x.repeat(2, 1), 0)),
    **of("softmax log_softmax softmin", lambda a: (a.x, -1), lambda a: (a.x, {"dim": 0}),
         lambda a: (a.x, -1, {"dtype": torch.float64})),
    **of("normalize", x, lambda a: (a.x, 1.0, 0)),
    **of("prelu", lambda a: (a.x, torch.full((1,), 0.2, dtype=a.dtype, device=a.device))),
    **of("layer_norm rms_norm", lambda a: (a.x, [a.last]), lambda a: (a.x, (a.last,), a.weight),
         lambda a: (a.x, [a.last], {"weight": a.weight})),
    **of("group_norm", lambda a: (a.x, 1), lambda a: (a.x, 1, a.weight, a.bias)),
    **of("clamp clip", lambda a: (a.x, -0.5, 0.5), lambda a: (a.x, {"min": a.y}), lambda a: (a.x, None, a.y)),
    **of("clamp_min clamp_max", lambda a: (a.x, 0.1), lambda a: (a.x, a.y)),
    **of("lerp", lambda a: (a.x, a.y, a.z), lambda a: (a.x, a.y, 0.3)),
    **of("addcmul addcdiv", lambda a: (a.x, a.y, a.u), lambda a: (a.x, a.y, a.u, {"value": 0.3})),
    **of("where", lambda a: (a.flag, a.x, a.y), lambda a: (a.flag, a.x, 0.5)),
    **of("masked_fill", lambda a: (a.x, a.flag, -1.0), lambda a: (a.x, a.flag, a.bias[0])),
    **of("nan_to_num", lambda a: (a.x / (a.x > 0),), lambda a: (a.x, 1.0)),
    **of("fill", lambda a: (a.x, 2.0), lambda a: (a.x, a.y[0, 0])),
    **of("cat concat concatenate stack", *JOINED, lambda a: ([a.x, a.y], 1)),
    **of("hstack vstack dstack", *JOINED),
    **of("block_diag", lambda a: (a.x[0], a.y[0])),
    **of("pixel_shuffle channel_shuffle", lambda a: (a.x[:2, :4, None, None].expand(-1, -1, 2, 2), 2),
         lambda a: (a.x[:2, :4, None, None].expand(-1, -1, 2, 2), 1)),
    **of("pixel_unshuffle", lambda a: (a.x[None, :2, :4], 2)),
    **of("repeat", lambda a: (a.x, 1, 2), lambda a: (a.x, [2, 1])),
    **of("tile", lambda a: (a.x, (2,)), lambda a: (a.x, [2, 3])),
    **of("repeat_interleave", lambda a: (a.x, 2), lambda a: (a.x, a.j[:, 0].clone(), {"dim": 0})),
    **of("roll", lambda a: (a.x, 1), lambda a: (a.x, [1, 2], [0, 1])),
    **of("flip", lambda a: (a.x, [0]), lambda a: (a.x, (0, 1))),
    **of("rot90", lambda a: (a.x, 1, [0, 1]), lambda a: (a.x, 2, (0, 1))),
    **of("index_select", lambda a: (a.x, 0, a.indices(1, 1, 2))),
    **of("gather", lambda a: (a.x, 0, a.i.abs() % 3)),
    **of("take", lambda a: (a.x, a.i.abs() % 9)),
    **of("index_fill", lambda a: (a.x, 0, a.indices(0, 2), 3.0)),
    **of("masked_scatter", lambda a: (a.x, a.flag, a.y)),
    **of("diagonal_scatter", lambda a: (a.x, a.y.diagonal())),
    **of("select_scatter", lambda a: (a.x, a.y[0], 0, 1)),
    **of("slice_scatter", lambda a: (a.x, a.y[:1], 0, 1, 2)),
    **of("take_along_dim", lambda a: (a.x, a.i.abs() % 3, 0), lambda a: (a.x.contiguous(), a.i.abs().flatten() % 9)),
    **of("tril triu", x, lambda a: (a.x, 1)),
    **of("arange", lambda a: (7, {"device": a.device}), lambda a: (0.5, 4.0, 0.5, {"device": a.device})),
    **of("zeros ones", lambda a: (4, 6, {"device": a.device}), lambda a: ([4, 6], {"device": a.device})),
    **of("full", lambda a: ((4, 6), 2.0, {"device": a.device}), lambda a: ([4, 6], 3, {"device": a.device})),
    **of("full_like", lambda a: (a.x, 2.0)),
    **of("to", lambda a: (a.x, torch.float64), lambda a: (a.x, {"dtype": torch.bfloat16, "copy": True}),
         lambda a: (a.x, a.y), lambda a: (a.x, a.i), lambda a: (a.x, a.device)),
    **of("type", lambda a: (a.x, torch.float64), x),
    **of("type_as", lambda a: (a.x, a.i), lambda a: (a.i, a.x)),
    **of("float half bfloat16 double", x, lambda a: (a.i,), flag),
    **of("contiguous", x, lambda a: (a.x.transpose(0, 1),)),
    **of("reshape", lambda a: (a.x, (-1,)), lambda a: (a.x.transpose(0, 1), [-1, a.last])),
    **of("flatten", lambda a: (a.x,), lambda a: (a.x.transpose(0, 1), 0, 1)),
    **of("reshape_as", lambda a: (a.x.transpose(0, 1), a.x)),
    **of("__getitem__", lambda a: (a.x, a.indices(0, 2, 1)), lambda a: (a.x, (a.indices(0, 1), slice(1, None))),
         lambda a: (a.x, [0, 2]), lambda a: (a.x, (slice(None), [0, 2])), lambda a: (a.x, a.flag),
         lambda a: (a.x, (0, None)), lambda a: (a.x, slice(1, 3))),
}  # fmt: skip
#: Functions that write to their first argument, beside those whose name without "_" or "i" stands above.
WRITERS = {
    **of("addbmm_", lambda a: (a.x, a.normal(2, 8, 3), a.normal(2, 3, 20))),
    **of("baddbmm_", lambda a: (a.x[None], a.normal(1, 8, 3), a.normal(1, 3, 20))),
    **of("addmm_", lambda a: (a.x, a.normal(8, 3), a.normal(3, 20))),
    **of("addmv_", lambda a: (a.weight, a.normal(20, 3), a.normal(3))),
    **of("addr_", lambda a: (a.x, a.normal(8), a.normal(20))),
    **of("apply_", lambda a: (a.x, lambda number: number + 1)),
    **of("map_", lambda a: (a.x, a.y, operator.add)),
    **of("map2_", lambda a: (a.x, a.y, a.z, lambda x, y, z: x + y + z)),
    **of("bernoulli_ cauchy_ exponential_ log_normal_ normal_ random_ uniform_ zero_ conj_physical_", x),
    **of("kaiming_uniform_", x),
    **of("_philox_normal_ _philox_uniform_", lambda a: (a.x, a.indices(3, 4).to(torch.uint64))),
    **of("scaled_addmm_", scaled),
    **of("_philox_randint_", lambda a: (a.indices(3, 4), a.indices(3, 4).to(torch.uint64))),
    **of("dropout_ alpha_dropout_ feature_dropout_ feature_alpha_dropout_", lambda a: (a.x, 0.5, True)),
    **of("hardtanh_ leaky_relu_ relu6_ rrelu_", x),
    **of("rrelu_with_noise_", lambda a: (a.x, a.y, 0.1, 0.3, True)),
    **of("threshold_", lambda a: (a.x, 0.1, 0.5)),
    **of("embedding_renorm_", lambda a: (a.x, a.indices(0, 2), 0.1, 2.0)),
    **of("geometric_", lambda a: (a.x, 0.5)),
    **of("copy_ set_ resize_as_", lambda a: (a.x, a.y)),
    **of("fill_diagonal_ constant_", lambda a: (a.x, 3.0)),
    **of("resize_", lambda a: (a.x, 9, 20)),
    **of("cumprod_ cumsum_ unsqueeze_", lambda a: (a.x, 0)),
    **of("squeeze_", lambda a: (a.x[:1], 0)),
    **of("swapaxes_ swapdims_ transpose_", lambda a: (a.x, 0, 1)),
    **of("t_", x),
    **of("as_strided_", lambda a: (a.x, (20, 8), (1, 20))),
    **of("float_power_", lambda a: (a.u.double(), 2)),
    **of("igamma_ igammac_", lambda a: (a.u, a.u + 1)),
    **of("mvlgamma_", lambda a: (a.u + 3, 2)),
    **of("polygamma_", lambda a: (a.u, 1)),
    **of("renorm_", lambda a: (a.x, 2, 0, 1.0)),
    **of("index_add_ index_copy_", lambda a: (a.x, 0, a.indices(0, 2), a.y[:2])),
    **of("index_put_", lambda a: (a.x, (a.indices(0, 2),), a.y[:2])),
    **of("index_reduce_", lambda a: (a.x, 0, a.indices(0, 2), a.y[:2], "amax")),
    **of("put_", lambda a: (a.x, a.indices(0, 2), a.y[0, :2])),
    **of("scatter_ scatter_add_", lambda a: (a.x, 0, a.indices(0, 2)[None], a.y)),
    **of("scatter_reduce_", lambda a: (a.x, 0, a.indices(0, 2)[None], a.y, "amax")),
    **of("__setitem__", lambda a: (a.x, 0, 3.0), lambda a: (a.x, a.flag, 3.0)),
    **of("_coalesced_", lambda a: (a.x.to_sparse(), False)),
    **of("resize_as_sparse_", lambda a: (a.x.to_sparse(), a.y.to_sparse())),
    **of("sparse_resize_ sparse_resize_and_clear_", lambda a: (a.x.to_sparse(), (9, 20), 2, 0)),
}  # fmt: skip
#: As methods, where those take their arguments in another order.
METHODS = {
    "where": (lambda a: (a.x, a.flag, a.y), lambda a: (a.x, a.flag, 0.5)),
    "tile": (lambda a: (a.x, 2), lambda a: (a.x, [2, 3])),
}


class Call(NamedTuple):
    function: Any
    make: Any

    def __call__(self, a):
        *args, last = self.make(a)
        return (tuple(args), last) if isinstance(last, dict) else ((*args, last), {})


def name_of(function):
    """``torch.add``, ``Tensor.add``, ``F.gelu`` or ``special.ndtr``."""
    name = function.__name__
    for prefix, home in (("torch", torch), ("Tensor", Tensor), ("F", F), ("special", torch.special)):
        for bare in (name, name.removeprefix("special_")):
            if getattr(home, bare, None) is function:
                return f"{prefix}.{bare}"
    found = [n for home in (Tensor, F) for n in dir(home) if getattr(home, n, None) is function]
    return found[0] if found else name


def calls_of(function):
    """All ways to call ``function``; an error where there is none."""
    name = name_of(function)
    home, _, bare = name.rpartition(".")
    makes = (METHODS.get(bare) if home == "Tensor" else None) or EXAMPLES.get(bare) or WRITERS.get(bare)
    if makes is None and bare.startswith("__i"):
        makes = EXAMPLES.get(f"__{bare[3:]}") or EXAMPLES.get(bare[3:-2])
    elif makes is None:
        makes = EXAMPLES.get(bare.removesuffix("_"))
    if makes is None:
        raise LookupError(f"{name} has no example arguments: add some to tests/support/examples.py")
    return [Call(function, make) for make in makes]


def consumed(y):
    """A product that keeps ``y``, and the leaf whose gradient is ``y`` times a constant."""
    dtype = y.dtype if y.is_floating_point() else torch.float32
    weight = random(*y.shape, dtype=dtype, device=y.device, seed=21).requires_grad_()
    return y * weight, weight
