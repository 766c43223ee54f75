"""Inductor without its code: joint passes and partitioner run, and their graphs are run op by op.

As ``no_codegen`` interprets them, steps are those of real code. ``Graphs`` counts what graphs keep and run again, and
draws other numbers in backward.
"""

import contextlib
import functools
from dataclasses import dataclass, field

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx, inductor_prims
from torch._inductor import config as inductor
from torch._inductor.virtualized import V
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import cpp_extension
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave.count.peak import Count


class _Interpreted(fx.Interpreter):
    """Random numbers are a function of their seed, as in Inductor's kernels (its own ops draw others each time)."""

    def call_function(self, target, args, kwargs):
        if target is inductor_prims.random:
            size, seed, mode = args
            return getattr(torch, mode)(size, generator=torch.Generator().manual_seed(seed.item()))
        return super().call_function(target, args, kwargs)


def _interpret(graph, inputs, **kwargs):
    def run(inputs):
        taken = list(inputs)
        inputs.clear()
        return _Interpreted(graph).run(*taken)

    run._boxed_call = True
    return run


@contextlib.contextmanager
def interpreted(monkeypatch):
    """Have all that Inductor compiles interpreted."""
    compile = functools.partial(compile_fx.compile_fx, inner_compile=_interpret)
    monkeypatch.setattr(compile_fx, "compile_fx", compile)
    torch._dynamo.reset()
    with functorch.patch(enable_autograd_cache=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def no_codegen(monkeypatch):
    with interpreted(monkeypatch):
        yield


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """PyTorch's, by a path without spaces: Inductor links by no other."""
    (tmp_path / "lib").symlink_to(cpp_extension.TORCH_LIB_PATH)
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(tmp_path / "lib"))


class _Count(Count):
    """Calls of attention that keep the generator's state are higher-order operators."""

    supports_higher_order_operators = True

    def note(self, call):
        pass


@dataclass(eq=False)
class Graphs:
    """A backend for ``torch.compile``: the graphs that ``partitioner`` makes, Inductor's own for None."""

    partitioner: object = None
    forwards: list = field(default_factory=list)
    backwards: list = field(default_factory=list)
    count: _Count = field(default_factory=_Count)

    def __call__(self, graph, inputs):
        return aot_autograd(
            fw_compiler=self._noting(self.forwards), bw_compiler=self._noting(self.backwards),
            inference_compiler=self._noting([]), partition_fn=self._partition,
            decompositions=compile_fx.select_decomp_table,
        )(graph, inputs)  # fmt: skip

    def _partition(self, joint, inputs, **kwargs):
        with V.set_fake_mode(detect_fake_mode(inputs)), inductor.patch(custom_partitioner_fn=self.partitioner):
            return compile_fx.partition_fn(joint, inputs, **kwargs)

    def _noting(self, graphs):
        def compiler(graph, inputs):
            graphs.append(graph.graph)

            def run(*args):
                with self.count:
                    return graph(*args)

            return make_boxed_func(run)

        return compiler

    def run_again(self, name):
        """How many calls of ops with ``name`` in theirs all backward graphs hold, but for derivatives."""
        targets = [str((n.target, n.args)) for graph in self.backwards for n in graph.nodes if n.op == "call_function"]
        return sum(name in target and "backward" not in target for target in targets)


def by_blocks(model, backend):
    """Compiles each repeated block by itself."""
    for block in model.modules():
        if isinstance(block, GradientCheckpointingLayer):
            block.compile(backend=backend)


def whole(model, backend):
    """Compiles the model as one graph."""
    model.compile(backend=backend, fullgraph=True)


@contextlib.contextmanager
def saved(model, batch):
    """Yields a list of bytes, in the end one a storage that autograd saves: no parameter's, buffer's or batch's."""
    known = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers(), *batch.values())}
    found, sizes = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            found[storage._cdata] = storage  # held, so that no other storage gets its address
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes
    sizes.extend(storage.nbytes() for storage in found.values())


def compiled_layer(model, batch, partitioner=None, compile=by_blocks, is_autocast=False):
    """Bytes that a layer of a compiled model hands to its backward, and the graphs; its stack ends with two fewer."""
    torch._dynamo.reset()
    graphs, kept = Graphs(partitioner), []
    compile(model, graphs)
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    stack = max((m for m in stacks if isinstance(m[0], GradientCheckpointingLayer)), key=len)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast), saved(model, batch) as sizes:
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        kept.append(sum(sizes))
        del stack[-2:]
    torch._dynamo.reset()
    return (kept[0] - kept[1]) / 2, graphs
