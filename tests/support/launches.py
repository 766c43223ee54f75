"""What a layer launches beside its products and attention, and the bytes those launches read and write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import BertConfig, LlamaConfig

from hf_memsave import WTACRS, MemSaveConfig, patch
from hf_memsave.measure.fake_device import fake_device, to_fake

#: Products, which are not counted.
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
#: What only allocates, or asks.
_FREE = ("empty", "new_empty", "_unsafe_view", "promote_types")
#: Launches of an operation beyond one, where it gives a vector its gradient: a sum of parts; our own also round it.
_MORE = {
    "native_layer_norm_backward": 1, "rms_norm_backward": 2, "dropout_norm_backward": 2, "output_norm_backward": 2,
    "draw": 2,  # a sort, and a launch before the last
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts operations that make something new, which on a GPU is a launch at least.

    Attributes:
        names: Operation -> how often.
        nbytes: What they read and write, each element of each storage once an operation; attention's apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.nbytes = 0

    @property
    def count(self) -> int:
        """Of all."""
        return self.names.total()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
        home, name = func._schema.name.split("::")
        out = func(*args, **(kwargs or {}))
        if home == "prim" or is_view or name.startswith(_FREE) or name in _PRODUCTS:
            return out
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        more = _MORE.get(name, 0) if given.get("has_dw", True) else 0
        if more and "has_dw" in given and out[2 if name == "dropout_norm_backward" else 1].dtype == torch.float32:
            more //= 2  # nothing to round
        self.names[name] += 1 + more
        if "attention" not in name:
            read = {(x.untyped_storage(), x.storage_offset(), x.shape): x for x in tensors((args, kwargs))}
            self.nbytes += sum(map(nbytes, [*read.values(), *tensors(out)]))
        return out


def tensors(tree: Any) -> list[Tensor]:
    """All in it."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def nbytes(x: Tensor) -> int:
    """Of the elements of a tensor that are there: an expanded one has fewer than its shape says."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count * x.itemsize


def a_layer(
    make: Callable[[int], nn.Module], config: Any, batch: int, tokens: int, is_autocast: bool = False,
    labels: Callable[[Tensor], Tensor] = lambda ids: ids, layers: tuple[int, int] = (2, 4),
) -> tuple[float, float]:  # fmt: skip
    """Launches and bytes of a layer's forward and backward, in a step like those before.

    Args:
        make: Makes the model with so many layers.
        config: It is patched with; None for stock.
        batch: Samples.
        tokens: Of each.
        is_autocast: Whether it runs under bf16 autocast.
        labels: Of token ids.
        layers: The mean is of those between.

    Returns:
        Both.
    """
    found = []
    for count in layers:
        with torch.device("meta"):
            model = make(count)
        with fake_device() as device:
            to_fake(model, device)
            if config is not None and config.linear is not None:  # all blocks, by their numbers
                config = replace(config, linear=replace(config.linear, targets=tuple(map(str, range(count)))))
            if config is not None:
                patch(model, config, replace=True)
            ids = torch.zeros(batch, tokens, dtype=torch.long, device=device)
            for _ in range(3):  # what is asked of the first two is known in the third
                model.zero_grad()
                with Launches() as step:
                    with torch.autocast(device.type, torch.bfloat16, enabled=is_autocast):
                        loss = model(input_ids=ids, labels=labels(ids)).loss
                    loss.backward()
                del loss
        found.append((step.count, step.nbytes))
    (few, few_bytes), (more, more_bytes) = found
    between = layers[1] - layers[0]
    return (more - few) / between, (more_bytes - few_bytes) / between


_LLAMA = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=512)
_BERT = dict(hidden_size=1024, intermediate_size=4096, num_attention_heads=16, attention_probs_dropout_prob=0.0)
METHODS = {"stock": None, "torch": MemSaveConfig(), "Triton": MemSaveConfig(backend="triton")}
#: What is not exact, each with both backends.
APPROXIMATE = {
    "invert": MemSaveConfig(activation="invert"),
    "precision_bit": MemSaveConfig(activation="precision_bit"),
    "few_bit": MemSaveConfig(activation="few_bit"),
    "norm=output": MemSaveConfig(norm="output"),
    "int8": MemSaveConfig(storage="int8"),
    "int4": MemSaveConfig(storage="int4"),
    "wta-crs": MemSaveConfig(linear=WTACRS(budget=0.3)),
}
METHODS |= {
    f"{way}, {name}": replace(config, backend=backend)
    for way, config in APPROXIMATE.items()
    for name, backend in (("torch", "torch"), ("Triton", "triton"))
}
EXACT = "stock", "torch", "Triton"


class Setting(NamedTuple):
    """A shape, and how it is trained."""

    make: Callable[[int], nn.Module]
    batch: int
    tokens: int
    is_autocast: bool = False
    classifies: bool = False


def bert(layers: int) -> nn.Module:
    """BERT-Large's proportions; weights in fp32."""
    return transformers.BertForSequenceClassification(BertConfig(num_hidden_layers=layers, **_BERT)).train()


def llama(layers: int) -> nn.Module:
    """Llama-3-8B's proportions in bf16, with a small vocabulary."""
    return transformers.LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **_LLAMA)).bfloat16().train()


def adapted(layers: int) -> nn.Module:
    """The same with LoRA adapters of rank 16 at all linears, in fp32 as PEFT makes them."""
    options: dict[str, Any] = dict(r=16, lora_dropout=0.05, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(llama(layers), LoraConfig(**options)).train()


def low_bert(layers: int) -> nn.Module:
    """BERT-Large's proportions in bf16."""
    return bert(layers).bfloat16()


SETTINGS = {
    "BERT-Large, S512, bf16 autocast": Setting(bert, 16, 512, is_autocast=True, classifies=True),
    "BERT-Large, S512, bf16": Setting(low_bert, 16, 512, classifies=True),
    "Llama-3-8B, full": Setting(llama, 1, 2048),
    "Llama-3-8B, LoRA p=.05": Setting(adapted, 1, 2048),
}


def counted(
    name: str, methods: Sequence[str] = EXACT, layers: tuple[int, int] = (2, 4)
) -> dict[str, tuple[float, float]]:
    """Method -> launches and bytes of a layer, the mean of those between so many layers."""
    setting = SETTINGS[name]

    def labels(ids: torch.Tensor) -> torch.Tensor:
        return ids[:, 0] if setting.classifies else ids

    return {
        method: a_layer(
            setting.make, METHODS[method], setting.batch, setting.tokens, setting.is_autocast, labels, layers
        )
        for method in methods
    }
