"""``MemSaveConfig``: what to keep for backward, in one frozen, strict, serializable place."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from hf_memsave.config_files import fields_of, is_file, listed, presets, refuse_unknown
from hf_memsave.errors import ConfigError, PlanError
from hf_memsave.limited import as_pairs
from hf_memsave.sizes import bytes_of
from hf_memsave.wtacrs import WTACRS, is_int


@dataclass(frozen=True, kw_only=True)
class MemSaveConfig:
    """What to keep instead of each kind of tensor. The defaults are exact, and to the bit (but see ``loss``).

    Attributes:
        activation: Outputs of activations and gates: recomputed from their inputs, or kept as stock does. Not exact:
            "invert" (the output and one bit an element are kept, and the slope is read off them), "precision_bit" (the
            bit in the output's last one), "few_bit" (:attr:`few_bits` bits of the slope alone where nothing wants the
            output, as before a frozen linear; elsewhere "recompute").
        few_bits: Bits an element for activation="few_bit", 1 to 8.
        norm: Outputs of norms: recomputed from their inputs, or kept as stock does. Not exact: "output" (the output is
            kept instead of the input, and backward starts from it).
        dropout: Masks: drawn again from the generator's state ("seed"), kept in one bit an element ("mask": faster on
            CPU), or kept as stock does.
        attention: SDPA's repeated k and v, masks and transposed output, and what eager attention computes beyond its
            softmax: recomputed or shared, or kept as stock does.
        frozen: Selective differentiation: convolutions, batch norms, pools and rectifiers keep only what the wanted
            gradients need.
        lora: PEFT adapters' casts of their input: recomputed, or kept as stock does.
        loss: A language model's head and cross-entropy: "chunked" (logits of more than 128 MiB in fp32 are computed a
            chunk at a time, and gradients equal stock's up to the order of fp32 sums), or "stock".
        backend: What computes RMSNorms, activations, gated MLPs, rotary embeddings, BERT's dropout and norm, LoRA's
            input and sum, a chunk of a loss, and what is not exact: PyTorch's operations ("torch"), or one Triton
            kernel each way ("auto": where Triton runs; "triton": or an error). As exact, but not the same bits.
        linear: Weight gradients of linears: exact (None), or unbiased from a sample of rows (:class:`WTACRS`).
        storage: What still has to be kept: as it is (None), or activations in about 8 ("int8") or 4.5 bits ("int4") an
            element, rounded at random. Not exact: the weight gradient of a linear that keeps its own input is unbiased,
            the others are approximate. What is remade keeps nothing, and rows and bits are kept as they are.
        checkpoint: Which products of a repeated block run again in backward, so that what they give is not kept: none
            (the floor); "o_proj" (attention's output projection), and with it "qkv", and with those "up", "gate" (all
            of an MLP that an activation reads), "block" (and attention itself). Exact; it costs their time.
        offload: Whether what still has to be kept goes to main memory, and comes back in backward. Exact. It is for
            CUDA, where it shares the bus with nothing else; under gradient checkpointing, a block's input stays.
        budget: What a training step may take of a GPU, in bytes or as "24GiB": the cheapest checkpoint and offload that
            fit are planned (:func:`hf_memsave.plan`) where a batch size and a sequence length are known: by
            ``Trainer(..., memsave=...)`` and ``MemSaveCallback``.
        layers: How many blocks to convert of each kind, such as ``{"activation": 6, "norm": 12, "dropout": 0}``: in the
            first so many repeated blocks of the model (an encoder's before a decoder's) the field of that name holds,
            elsewhere those modules stay stock. Kinds that are not named, and all with None, are converted everywhere.
            What lies outside every block (embeddings, a last norm, a head) goes with the first block. For "checkpoint"
            also a part of the blocks, such as 0.5. Held as sorted pairs.
    """

    activation: Literal["recompute", "invert", "precision_bit", "few_bit", "stock"] = field(default="recompute")
    few_bits: int = field(default=4)
    norm: Literal["recompute", "output", "stock"] = field(default="recompute")
    dropout: Literal["seed", "mask", "stock"] = field(default="seed")
    attention: Literal["recompute", "stock"] = field(default="recompute")
    lora: Literal["recompute", "stock"] = field(default="recompute")
    frozen: bool = field(default=True)
    loss: Literal["chunked", "stock"] = field(default="chunked")
    backend: Literal["torch", "auto", "triton"] = field(default="torch")
    linear: WTACRS | None = field(default=None)
    storage: Literal["int8", "int4"] | None = field(default=None)
    checkpoint: Literal["o_proj", "qkv", "up", "gate", "block"] | None = field(default=None)
    offload: bool = field(default=False)
    budget: int | str | None = field(default=None)
    layers: Mapping[str, float] | tuple[tuple[str, float], ...] | None = field(default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", as_pairs(self.layers))
        for name, allowed in _choices().items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(
                    f"MemSaveConfig.{name} must be one of {listed(allowed)}, got {value!r}. "
                    f"Leave it out for the default, {allowed[0]!r}."
                )
        if not (is_int(self.few_bits) and 1 <= self.few_bits <= 8):
            raise ConfigError(
                f"MemSaveConfig.few_bits must be a whole number from 1 to 8, got {self.few_bits!r}. "
                "Leave it out for the default, 4."
            )
        for name, default in (("frozen", True), ("offload", False)):
            if not isinstance(value := getattr(self, name), bool):
                raise ConfigError(
                    f"MemSaveConfig.{name} must be True or False, got {value!r}. Leave it out for the default, "
                    f"{default}."
                )
        if not (self.linear is None or isinstance(self.linear, WTACRS)):
            raise ConfigError(
                f"MemSaveConfig.linear must be None or a WTACRS, got {self.linear!r}. Use WTACRS(budget=0.3), or leave "
                "it out for exact weight gradients."
            )
        if self.budget is not None:
            self._check_budget()
        elif self.checkpoint is None and "checkpoint" in dict(self.layers or ()):
            raise ConfigError(
                "MemSaveConfig.layers['checkpoint']: expected a checkpoint= that it limits, got none. Use "
                "checkpoint='gate' or another rung with it."
            )
        if self.storage is not None and self.activation == "precision_bit":
            raise ConfigError(
                f"MemSaveConfig.storage={self.storage!r} rounds the last bit of what it keeps, got "
                "activation='precision_bit', which keeps a bit there. Use activation='invert', or leave storage out."
            )

    def _check_budget(self) -> None:
        assert self.budget is not None
        try:
            bytes_of(self.budget, "MemSaveConfig.budget")
        except PlanError as error:
            raise ConfigError(str(error)) from error
        if self.checkpoint is not None or self.offload or "checkpoint" in dict(self.layers or ()):
            raise ConfigError(
                f"MemSaveConfig.budget={self.budget!r} chooses checkpoint and offload, got "
                f"checkpoint={self.checkpoint!r}, offload={self.offload}, layers={dict(self.layers or ())}. Leave out "
                "either the budget or those."
            )

    @classmethod
    def resolve(cls, value: MemSaveLike | None, *, may_plan: bool = False) -> MemSaveConfig | None:
        """What a ``memsave=`` argument means.

        Args:
            value: True for the default, a preset's name, a YAML or JSON file (as ``memsave plan --out`` writes it), a
                dict of fields, a config, or False.
            may_plan: Whether a budget is allowed, for a caller that knows a batch size and a sequence length.

        Returns:
            The config; None for False and None.

        Raises:
            ConfigError: It names a preset, file, field or value that does not exist, or a budget where no batch is
                known.
        """
        if value is None or value is False:
            return None
        if value is True:
            found = cls()
        elif isinstance(value, cls):
            found = value
        elif isinstance(value, (str, Path)):
            found = cls.named(value)
        elif isinstance(value, dict):
            found = cls.from_dict(value)
        else:
            raise ConfigError(
                "memsave must be True, False, a preset's name, a YAML or JSON file, a dict of fields or a "
                f"MemSaveConfig, got {type(value).__name__}. Use memsave=True for the exact default."
            )
        if found.budget is not None and not may_plan:
            raise ConfigError(
                f"MemSaveConfig.budget={found.budget!r}: expected a batch size and a sequence length to plan for, got "
                f"none here. Use hf_memsave.plan(model, budget={found.budget!r}, batch_size=..., seq_len=...).config, "
                "or give it to a trainer, which knows both: Trainer(..., memsave=MemSaveConfig(budget=...))."
            )
        return found

    @classmethod
    def named(cls, name: str | Path) -> MemSaveConfig:
        """The config of a preset, or of a YAML or JSON file: :meth:`preset` or :meth:`from_file`."""
        return cls.from_file(name) if isinstance(name, Path) or is_file(name) else cls.preset(name)

    @classmethod
    def preset(cls, name: str) -> MemSaveConfig:
        """The config that ``configs/presets/<name>.yaml`` holds.

        Returns:
            A config of its own fields and the defaults.

        Raises:
            ConfigError: There is no such preset; the message lists those there are.
        """
        found = presets()
        if name not in found:
            raise ConfigError(
                f"unknown preset {name!r}: expected one of {listed(found)}, or a .yaml or .json file. Use "
                "memsave=True for the exact default, or MemSaveConfig(...) to choose each field."
            )
        return cls.from_dict(yaml.safe_load(found[name].read_text(encoding="utf-8")) or {})

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> MemSaveConfig:
        """The config with these fields.

        Returns:
            The config; fields not given have their defaults.

        Raises:
            ConfigError: A key is no field, or a value is not allowed.
        """
        if not isinstance(fields, dict):
            raise ConfigError(f"expected a mapping of MemSaveConfig fields, got {type(fields).__name__}: {fields!r}.")
        refuse_unknown(cls, fields)
        if isinstance(linear := fields.get("linear"), dict):
            refuse_unknown(WTACRS, linear)
            fields = {**fields, "linear": WTACRS(**linear)}
        return cls(**fields)

    def callback(self, **options: Any) -> Any:
        """``MemSaveCallback(self, **options)``: how a trainer takes the config that has no argument ``memsave``."""
        return import_module("hf_memsave.integrations.trainer").MemSaveCallback(self, **options)  # of a floor above

    def to_dict(self) -> dict[str, Any]:
        """Every field, as JSON and YAML know it."""
        fields = dataclasses.asdict(self) | {"layers": dict(self.layers) if self.layers else None}
        return dict(json.loads(json.dumps(fields)))

    @property
    def is_exact(self) -> bool:
        """Whether gradients are stock's as mathematics: to the bit too, but for a chunked loss and Triton kernels."""
        return not self.inexact

    @property
    def inexact(self) -> tuple[str, ...]:
        """The fields by which gradients are not stock's, as Python writes them."""
        fields = {"activation": self.activation, "norm": self.norm, "storage": self.storage}
        found = [f'{name}="{value}"' for name, value in fields.items() if value not in (None, "recompute", "stock")]
        return tuple(found if self.linear is None else [*found, f"linear=WTACRS(budget={self.linear.budget})"])

    def converts(self, kind: str, block: int, blocks: int = 0) -> bool:
        """Whether what is of this kind is converted in the repeated block of this number, of so many."""
        first = self.first_blocks(kind)
        if isinstance(first, float):
            first = math.ceil(first * blocks)
        return getattr(self, kind) not in ("stock", None) and (first is None or block < first)

    def first_blocks(self, kind: str | None) -> float | None:
        """In how many of the first blocks sites of this kind are converted, or in what part of them; None for all."""
        return dict(self.layers or ()).get(kind or "")

    @classmethod
    def from_file(cls, path: str | Path) -> MemSaveConfig:
        """Read a JSON or YAML file (every JSON file is a YAML file).

        Returns:
            The config that :meth:`to_file` wrote.

        Raises:
            ConfigError: The file is missing, empty or malformed, or a field or value does not exist.
        """
        fields = fields_of(path)
        try:
            return cls.from_dict(fields)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def to_file(self, path: str | Path) -> None:
        """Write JSON where the name ends in ``.json``, else YAML."""
        text = json.dumps(self.to_dict(), indent=2) if str(path).endswith(".json") else yaml.safe_dump(self.to_dict())
        Path(path).write_text(text, encoding="utf-8")


#: What stands for a config: True for the default, False for none, a preset's name, a file, a dict of fields.
MemSaveLike = MemSaveConfig | str | Path | bool | dict[str, Any]


def _choices() -> dict[str, tuple[str | None, ...]]:
    """Field -> the values it may have, the default first, where those are names."""
    found: dict[str, tuple[str | None, ...]] = {}
    for name, hint in get_type_hints(MemSaveConfig).items():
        literal = next((h for h in (hint, *get_args(hint)) if get_origin(h) is Literal), None)
        if literal is not None:
            found[name] = get_args(literal) if hint is literal else (None, *get_args(literal))
    return found
