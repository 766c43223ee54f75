"""Training steps of PyTorch's own samples of operations and modules, patched and stock: counts, printed as JSON.

A case is a model of one block, which calls an operation with copies of its parameters, and hands on what comes out to
functions that keep it. A program of its own, for PyTorch's modules forbid a process to set any flag of a backend.
"""

import argparse
import contextlib
import copy
import ctypes
import gc
import itertools
import json
import logging
import time
import warnings
from collections import Counter
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave import MemSaveConfig, patch
from hf_memsave.tape import codecs
from hf_memsave.tape.content import Content
from hf_memsave.tape.table import TABLE
from support.op_infos import database
from support.tapes import is_counted

STEPS = 5
#: Functions that a case calls around the operation.
AROUND = (torch.mul, torch.sin, Tensor.to, F.linear)
#: glibc's: what is allocated and freed is filled with a byte of our choice, so that memory that nobody wrote to shows.
fill_memory = partial(getattr(ctypes.CDLL(None), "mallopt", lambda *_: None), -6)


def noted(name, tensor):
    """What tells a tensor from any other: its bits, which tell NaNs apart, and its layout."""
    with torch._C.DisableTorchFunction(), torch.no_grad():
        t = tensor.detach()
        layout = t.stride() if t.layout is torch.strided else t.layout
        t = (t if t.layout is torch.strided else t.to_dense()).resolve_conj().resolve_neg()
        raw = t.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()
        return name, t.dtype, t.shape, layout, raw


class Block(GradientCheckpointingLayer):
    """An operation, and on each number that it gives a linear and a function that keeps its input."""

    def __init__(self, call, given, dtype):
        super().__init__()
        self.call, self.dtype = call, dtype
        leaves, self.spec = pytree.tree_flatten(given)
        self.given = [f"given_{i}" if isinstance(x, Tensor) else (x,) for i, x in enumerate(leaves)]
        for name, x in zip(self.given, leaves, strict=True):
            if isinstance(x, Tensor):
                own = copy.deepcopy(x.detach()) if x.layout is torch.strided else x.detach().clone()
                setattr(self, name, nn.Parameter(own) if x.requires_grad else nn.Buffer(own))
        self.gate_proj = nn.Linear(1, 1).to(dtype)

    def copies(self):
        """Of each number that the operation is given a copy, by its name."""
        tensors = {name: getattr(self, name) for name in self.given if isinstance(name, str)}
        return {name: torch.mul(x, 1) for name, x in tensors.items() if x.is_floating_point() or x.is_complex()}

    def forward(self, found, **copies):
        leaves = [
            x[0] if isinstance(x, tuple) else torch.mul(copies[x], 1) if x in copies else getattr(self, x)
            for x in self.given
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        results = []
        for z in pytree.tree_leaves(self.call(*args, **kwargs)):
            found.append(noted("output", z) if isinstance(z, Tensor) else ("output", repr(z)))
            if isinstance(z, Tensor):
                z = z if z.layout is torch.strided else z.to_dense()
                z = torch.view_as_real(z.resolve_conj()) if z.is_complex() and not self.dtype.is_complex else z
                results.append(torch.sin(self.gate_proj(z.to(self.dtype)[..., None])))
        return tuple(results)


class Model(nn.Module):
    """The block, perhaps within a checkpoint, and a dropout.

    Of this, and of what the block is given, products with leaves, whose gradients are what was kept.
    """

    def __init__(self, call, given, dtype, around):
        super().__init__()
        self.layers = nn.ModuleList([Block(copy.deepcopy(call), given, dtype)])  # a copy of a module
        self.bias, self.around, self.weights = nn.Parameter(torch.ones(2)), around, []

    def forward(self, found):
        (block,), first, self.weights = self.layers, [], []
        copies = block.copies()
        outputs = self.around(block)(first, **copies)
        found += first  # and no more, should the block run again
        self.first, self.noted = first, len(first)
        loss = self.bias.square().sum()
        outputs = [z if z.is_complex() else F.dropout(z, 0.3) for z in outputs]
        for i, z in enumerate([*outputs, *(x for x in copies.values() if x.layout is torch.strided)]):
            weight = torch.rand(z.shape, generator=torch.Generator().manual_seed(i)).to(z.dtype).requires_grad_()
            self.weights.append(weight)
            loss = loss + (z * weight).sum().real
        return loss


def train(model, is_autocast, steps, made):
    """What a model gives in each step, and the error that ended it; ``made`` is left with what the last one remade."""
    found = []
    for seed in range(steps):
        made.clear()
        found.append([])
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks for every other device: slow
        model.zero_grad(set_to_none=True)
        try:
            with torch.autocast("cpu", torch.bfloat16) if is_autocast else contextlib.nullcontext():
                loss = model(found[-1])
            loss.backward()
        except Exception as error:
            return found, error
        made += [Block] * (len(model.first) > model.noted)
        tensors = {"loss": loss, "generator": torch.get_rng_state(), **{n: p.grad for n, p in model.named_parameters()}}
        tensors |= {f"consumer {i}": weight.grad for i, weight in enumerate(model.weights)}
        found[-1] += [name if t is None else noted(name, t) for name, t in tensors.items()]
    return found, None


def compare(make, config, is_autocast, made):
    """What became of a case, and what to say of it."""
    runs = []
    for steps in (STEPS, 2, STEPS):
        torch.default_generator.manual_seed(STEPS)
        model = make()
        fill_memory(85 * (len(runs) + 1))
        if len(runs) == 2:
            patch(model, config)
        runs.append(train(model, is_autocast, steps, made))
    (expected, error), (again, _), (ours, our_error) = runs
    if expected[:2] != again:
        return "not deterministic in stock", ""
    if (len(ours), type(our_error)) != (len(expected), type(error)):
        return "different", f"ours {our_error!r}, stock {error!r}"
    for step, found in enumerate(zip(ours, expected, strict=True)):
        for mine, stock in itertools.zip_longest(*found):
            if mine != stock:
                return "different", f"step {step}: {mine and mine[:4]}, stock {stock and stock[:4]}"
    return ("equal", "") if error is None else ("raised in stock", repr(error))


def spread(samples, most):
    samples = list(itertools.islice(samples, 100))
    return samples[:: -(-len(samples) // most) or 1]


def calls_of(op, dtype, most):
    """Functions, each with its arguments: samples of an operation, perhaps as a method too, and one in place."""
    is_wanted = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    samples = spread(op.sample_inputs_func(op, "cpu", dtype, is_wanted), most)  # sample_inputs walks the stack: slow
    for call, some in ((op.op, samples), (op.method_variant, samples[1:]), (op.inplace_variant, samples[:1])):
        yield from ((call, ((x.input, *x.args), x.kwargs)) for x in some if call)


def modules_of(info, dtype, most):
    """Modules, each with its arguments."""
    for training in (True, False) if info.train_and_eval_differ else (True,):
        for x in spread(info.module_inputs_func(info, "cpu", dtype, True, training), most):
            module = info.module_cls(*x.constructor_input.args, **x.constructor_input.kwargs)
            yield module.to(dtype).train(training), (x.forward_input.args, x.forward_input.kwargs)


def main():
    """Of each run, as "float32-autocast", how many cases came out how, and how many remade something once learned."""
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--every", type=int, default=1, help="every N-th operation and module, in each run the next")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()
    torch.set_num_threads(1)
    codecs.SMALLEST = 1  # bytes of booleans that become bits
    made, remake = [], Content._made

    def counted(content):
        if is_counted("_made", content):
            made.append(getattr(content.make, "func", content.make))
        return remake(content)

    Content._made = counted
    infos = [(op, calls_of) for op in database("common_methods_invocations").op_db]
    infos += [(info, modules_of) for info in database("common_modules").module_db]
    gc.freeze()
    for number, run in enumerate(options.runs):
        begin, counts, remade, told = time.process_time(), Counter(), Counter(), {}
        dtype, variant = getattr(torch, run.partition("-")[0]), run.partition("-")[2]
        rung = variant if variant in ("gate", "block") else None
        configs = [MemSaveConfig(checkpoint=rung, dropout=dropout) for dropout in ("auto", "seed")]
        around = partial(partial, checkpoint, use_reentrant=False) if variant == "checkpoint" else lambda block: block
        for info, cases_of in infos[number :: options.every]:
            torch.manual_seed(0)
            for call, given in cases_of(info, dtype, 2 if variant == "plain" else 1) if dtype in info.dtypes else ():
                make = partial(Model, call, given, dtype, around)
                outcome, why = compare(make, configs[counts.total() % 2], variant == "autocast", made)
                counts[outcome] += 1
                if outcome != "equal":
                    told.setdefault(outcome, []).append(f"{info.name}: {why}")
                remade["anything"] += bool(made)
                remade["by other functions"] += any(f in TABLE and f not in AROUND for f in made)
                remade["the product"] += Block in made or F.linear in made
        told = {outcome: sorted(set(said)) for outcome, said in told.items()}
        seconds = round(time.process_time() - begin, 1)
        print(json.dumps(dict(run=run, counts=counts, remade=remade, seconds=seconds, told=told)), flush=True)


if __name__ == "__main__":
    main()
