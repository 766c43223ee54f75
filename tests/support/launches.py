"""What a layer launches beside its products and attention, and the bytes those launches read and write."""

from collections import Counter
from dataclasses import replace
from functools import partial

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_memsave import WTACRS, MemSaveConfig, patch
from hf_memsave.measure.fake_device import fake_device, to_fake
from hf_memsave.ops.loss.unread import Unread
from support.zoo import Size, build

#: Products, which are not counted.
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
#: What only allocates, or asks.
_FREE = ("empty", "new_empty", "_unsafe_view", "promote_types")
#: What reads or writes of its first argument as many elements as it is given places.
_AT_PLACES = ("gather", "nll_loss_forward", "scatter_add_")
#: Launches of an operation beyond one, where it gives a vector its gradient: a sum of parts; our own also round it.
_MORE = {
    "native_layer_norm_backward": 1, "rms_norm_backward": 2, "dropout_norm_backward": 2, "output_norm_backward": 2,
    "activation_backward": 1, "draw": 2,  # a sort, and a launch before the last
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts operations that make something new (a launch on a GPU at least), and the bytes they read and write."""

    def __init__(self):
        super().__init__()
        self.names, self.nbytes = Counter(), 0

    @property
    def count(self):
        return self.names.total()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if Unread in types:  # the ops that it runs come one by one
            return NotImplemented
        is_view = any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
        home, name = func._schema.name.split("::")
        out = func(*args, **(kwargs or {}))
        if home == "prim" or is_view or name.startswith(_FREE) or name in _PRODUCTS:
            return out
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False))
        more = _MORE.get(name, 0) if given.get("has_dw", given.get("has_db", True)) else 0
        if more and "has_dw" in given and out[2 if name == "dropout_norm_backward" else 1].dtype == torch.float32:
            more //= 2  # nothing to round
        self.names[name] += 1 + more
        if name in _AT_PLACES:
            self.nbytes += sum(map(nbytes, tensors((args[1:], None if out is args[0] else out))))
        elif "attention" not in name:
            read = {(x.untyped_storage(), x.storage_offset(), x.shape): x for x in tensors((args, kwargs))}
            self.nbytes += sum(map(nbytes, [*read.values(), *tensors(out)]))
        return out


def tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def nbytes(x):
    """Of the elements of a tensor that are there: an expanded one has fewer than its shape says."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count * x.itemsize


METHODS = {"stock": None, "torch": MemSaveConfig(), "Triton": MemSaveConfig(backend="triton")}
#: What is not exact, each with both backends.
APPROXIMATE = {
    "invert": MemSaveConfig(activation="invert"), "precision_bit": MemSaveConfig(activation="precision_bit"),
    "few_bit": MemSaveConfig(activation="few_bit"), "norm=output": MemSaveConfig(norm="output"),
    "int8": MemSaveConfig(storage="int8"), "int4": MemSaveConfig(storage="int4"),
    "wta-crs": MemSaveConfig(linear=WTACRS(budget=0.3)),
}  # fmt: skip
METHODS |= {
    f"{way}, {name}": replace(config, backend=backend)
    for way, config in APPROXIMATE.items()
    for name, backend in (("torch", "torch"), ("Triton", "triton"))
}
EXACT = "stock", "torch", "Triton"


def bert(layers):
    """BERT-Large's proportions; weights in fp32."""
    return build("bert", Size(hidden=1024, heads=16, layers=layers))


def llama(layers, has_lora=False):
    """Llama-3-8B's proportions in bf16, with a small vocabulary; LoRA at all linears, as PEFT's in fp32."""
    size = Size(hidden=4096, heads=32, layers=layers)
    model = build("llama", size, torch.bfloat16, intermediate_size=14336, num_key_value_heads=8)
    lora = LoraConfig(r=16, lora_dropout=0.05, target_modules="all-linear", init_lora_weights=False)
    return (get_peft_model(model, lora) if has_lora else model).train()


#: What makes a model with so many layers, samples, tokens of each, and whether it runs under bf16 autocast.
SETTINGS = {
    "BERT-Large, S512, bf16 autocast": (bert, 16, 512, True),
    "BERT-Large, S512, bf16": (lambda layers: bert(layers).bfloat16(), 16, 512, False),
    "Llama-3-8B, full": (llama, 1, 2048, False),
    "Llama-3-8B, LoRA p=.05": (partial(llama, has_lora=True), 1, 2048, False),
}


def of_step(name, config, layers):
    """Launches and bytes of a forward and a backward, in a step like those before."""
    make, batch, length, is_autocast = SETTINGS[name]
    with torch.device("meta"):
        model = make(layers)
    with fake_device() as device:
        to_fake(model, device)
        if config is not None and config.linear is not None:  # all blocks, by their numbers
            config = replace(config, linear=replace(config.linear, targets=tuple(map(str, range(layers)))))
        if config is not None:
            patch(model, config, replace=True)
        ids = torch.zeros(batch, length, dtype=torch.long, device=device)
        for _ in range(3):  # what is asked of the first two is known in the third
            model.zero_grad()
            with Launches() as step:
                with torch.autocast(device.type, torch.bfloat16, enabled=is_autocast):
                    loss = model(input_ids=ids, labels=ids[:, 0] if name.startswith("BERT") else ids).loss
                loss.backward()
            del loss
    return step.count, step.nbytes


def counted(name, methods=EXACT, layers=(2, 4)):
    """Method -> launches and bytes of a layer, the mean of those between so many layers."""
    found = {}
    for method in methods:
        few, more = (of_step(name, METHODS[method], count) for count in layers)
        found[method] = tuple((b - a) / (layers[1] - layers[0]) for a, b in zip(few, more, strict=True))
    return found
