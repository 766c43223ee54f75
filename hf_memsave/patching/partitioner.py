"""The floor and its rungs under ``torch.compile``: what Inductor hands from a forward graph to its backward graph.

Inductor cuts the joint graph of forward and backward where the fewest bytes cross. By default it keeps dropout
masks, as its list of what may run again lacks random numbers of a kept seed; a budget below 1 runs attention again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils.checkpoint import CheckpointPolicy
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_memsave.arch.sites import is_run_again

#: Part of the key of Inductor's caches of compiled graphs: raise it when ``Floor`` changes what it keeps.
VERSION = 1
#: Settings of the partitioner, to recompute as the tape does: what is cheap, however far away or long the chain.
RULES = {
    "activation_memory_budget": 1.0, "treat_parameters_as_free_to_save": True, "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False, "ban_recompute_materialized_backward": False,
}  # fmt: skip
_CHEAP = {"inductor_random", "inductor_randint", "inductor_lookup_seed", "cat", "constant_pad_nd"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


@dataclass(frozen=True, repr=False)  # equal, or Dynamo would compile each block for its own backend
class Floor(CustomPartitionerFn):
    """A partitioner that keeps what the tape keeps: no mask, and no product that the rung runs again."""

    rung: str | None = None  # as MemSaveConfig.checkpoint; "block" alone runs attention again

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Cut the joint graph ``gm`` into a forward and a backward graph."""
        calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        is_of_blocks = any(map(_block, calls))  # a block that is compiled alone is in no stack of modules
        for node in calls:
            if "recompute" in node.meta:  # a user's checkpoint
                continue
            if self.rung == "block" and _leaves_block(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            elif _is_cheap(node) or self._is_run_again(node) and bool(_block(node)) == is_of_blocks:
                node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        # Inputs are held by others, or kept in any case: nothing that is made from them is kept beside them.
        if "static_lifetime_input_indices" in kwargs:
            kwargs["static_lifetime_input_indices"] = list(range(len(gm.graph.find_nodes(op="placeholder"))))
        with config.patch({name: value for name, value in RULES.items() if hasattr(config, name)}):
            return min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)

    def _is_run_again(self, node: fx.Node) -> bool:
        name = _name(node)
        if self.rung == "block":
            return name in _PRODUCTS or "scaled_dot_product" in name
        if self.rung is None or name not in _PRODUCTS:
            return False
        # ``L['self'].layers[0]._modules['mlp']`` -> ``L.self.layers.0._modules.mlp``
        paths = (re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path) for path, _ in _modules(node))
        return any(is_run_again(path, self.rung) for path in paths)

    def uuid(self) -> Any:
        """Return the key by which Inductor's caches distinguish partitioners."""
        return "hf_memsave", VERSION, self.rung


def _name(node: fx.Node) -> str:
    """Return the name of the op that ``node`` calls."""
    return getattr(node.target, "_opname", "") or str(node.target)


def _is_cheap(node: fx.Node) -> bool:
    """Return whether ``node`` makes a mask, or is an op by which masks and rotary embeddings are made."""
    is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    is_mask = is_pointwise and getattr(node.meta.get("val"), "dtype", None) == torch.bool
    return is_mask or _name(node) in _CHEAP


def _modules(node: fx.Node) -> list[tuple[str, Any]]:
    """Return the paths and classes of the modules around ``node``, outermost first."""
    return list((node.meta.get("nn_module_stack") or {}).values())


def _block(node: fx.Node) -> str | None:
    """Return the path of the outermost repeated block around ``node``; None outside every block."""
    paths = (p for p, cls in _modules(node) if isinstance(cls, type) and issubclass(cls, GradientCheckpointingLayer))
    return next(paths, None)


def _leaves_block(node: fx.Node) -> bool:
    """Return whether ``node`` is in a block and its result is used outside of that block."""
    block = _block(node)
    # Nodes of the backward have no modules around them.
    return block is not None and any(_modules(user) and _block(user) != block for user in node.users)
