"""Compiled models without code: Inductor's joint passes and its partitioner run, and then the graphs op by op.

Random numbers are then others each time that they are asked for, also in backward: counts hold, gradients do not.
"""

import contextlib
from dataclasses import dataclass, field

import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode
from torch._inductor import config as inductor
from torch._inductor.compile_fx import partition_fn, select_decomp_table
from torch._inductor.virtualized import V
from torch.autograd.graph import saved_tensors_hooks
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave.count.peak import Count


class _Count(Count):
    """Calls of attention that keep the generator's state are higher-order operators."""

    supports_higher_order_operators = True

    def note(self, func, args):
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
            inference_compiler=self._noting([]), partition_fn=self._partition, decompositions=select_decomp_table,
        )(graph, inputs)  # fmt: skip

    def _partition(self, joint, inputs, **kwargs):
        with V.set_fake_mode(detect_fake_mode(inputs)), inductor.patch(custom_partitioner_fn=self.partitioner):
            return partition_fn(joint, inputs, **kwargs)

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
