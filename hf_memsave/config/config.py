"""``MemSaveConfig``: what to keep for backward, as a frozen, strict, serializable dataclass."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from hf_memsave.config.fields import did_you_mean, listed, named_fields, refuse_unknown
from hf_memsave.config.files import fields_of, presets, write
from hf_memsave.config.sizes import bytes_of
from hf_memsave.config.wtacrs import WTACRS, is_int
from hf_memsave.errors import ConfigError, PlanError

#: What runs again in backward, from the least to the most; each is also the name of a preset.
Rung = Literal["o_proj", "qkv", "up", "gate", "block", "tiles"]
RUNGS: tuple[str, ...] = get_args(Rung)
#: The rungs by which whole blocks run again.
WHOLE = ("block", "tiles")
#: The fields that say what to do with a kind of module.
KINDS = ("activation", "norm", "dropout", "attention", "lora")
#: The fields that ``layers`` can limit.
LIMITED = (*KINDS, "checkpoint")


@named_fields
@dataclass(frozen=True, kw_only=True)
class MemSaveConfig:
    """A choice of what autograd keeps for backward. The defaults give stock's gradients, to the bit (but see ``loss``).

    The first five fields free more than the default does, each at its own price; the others are for advanced use.

    Example:
        >>> from hf_memsave import MemSaveConfig
        >>> config = MemSaveConfig(checkpoint="gate", layers={"checkpoint": 0.5})
        >>> config.is_exact, config.to_dict()["checkpoint"], MemSaveConfig.preset("gate")
        (True, 'gate', MemSaveConfig(checkpoint='gate'))

    Attributes:
        checkpoint: Which products of a repeated block run again in backward: none, "o_proj" (attention's output
            projection), and with it "qkv", and with those "up", "gate" (all of an MLP that an activation reads),
            "block" (and attention itself), "tiles" (as "block", with MLPs on a part of the tokens at a time: see
            ``tiles``). Exact; it costs the time of those products.
        tiles: Tokens of each sequence on which a block's MLPs, Python-written norms and LoRA layers run at a time,
            forward and backward; "auto": 4096 of all sequences. A shorter sequence runs as with "block", as does a
            module that mixes tokens. Loss and gradients equal stock's up to the order of sums in products, as weight
            gradients are summed over parts, in fp32. Implies checkpoint="tiles", which without it takes "auto".
        offload: Whether what still has to be kept goes to main memory, and comes back in backward. Exact, for CUDA.
        budget: GPU memory for a training step, in bytes or as "24GiB": trainers, which know batch size and sequence
            length, plan the cheapest checkpoint and offload that fit (:func:`hf_memsave.plan`).
        storage: How what still has to be kept is stored: as it is (None), or activations in about 8 ("int8") or 4.5
            bits ("int4") an element, rounded stochastically. Not exact: the weight gradient of a linear
            that keeps its own input is unbiased.
        linear: Weight gradients of linears: exact (None), or unbiased from a sample of rows (:class:`WTACRS`).
        activation: Outputs of activations and gates: recomputed, or kept as stock does. Not exact: "invert" (kept: the
            output and one bit an element, which give the slope), "precision_bit" (the bit in the output's last one),
            "few_bit" (:attr:`few_bits` bits of the slope where nothing wants the output; elsewhere "recompute").
        few_bits: Bits an element for activation="few_bit", 1 to 8.
        norm: Outputs of norms: recomputed, or kept as stock does. Not exact: "output" (kept instead of the input).
        dropout: Dropout masks: drawn again from the generator's state ("seed"), kept in one bit an element ("mask"), by
            what is quicker ("auto": the state on CUDA, bits on CPU, there below the floor what is smaller), or kept as
            stock does.
        attention: SDPA's repeated k and v, masks and transposed output, and what eager attention computes beyond its
            softmax: recomputed or shared, or kept as stock does.
        lora: PEFT adapters' casts of their input: recomputed, or kept as stock does.
        frozen: Whether convolutions, batch norms, pools and rectifiers keep only what the wanted gradients need.
        loss: A language model's head and cross-entropy: "chunked" (logits of more than 128 MiB in fp32 a chunk at a
            time; gradients equal stock's up to the order of fp32 sums), or "stock".
        backend: For norms, activations, gated MLPs, rotary embeddings, dropout, LoRA, loss chunks and what is not
            exact: "torch", or Triton ("auto": where it runs; "triton": or an error), as exact, but not the same bits.
        compile: Whether each repeated block is compiled on its own (``torch.compile``, with a partitioner that keeps as
            little). As exact, but not the same bits: sums in another order, and other dropout masks.
        layers: Field -> the number of first blocks (an encoder's before a decoder's) in which it holds, such as
            ``{"activation": 6, "dropout": 0}``; modules of later blocks stay stock, and fields not named hold
            everywhere. What lies outside every block goes with the first. For "checkpoint" also a fraction of the
            blocks, such as 0.5. Held as sorted pairs.
    """

    checkpoint: Rung | None = None
    tiles: int | Literal["auto"] | None = None
    offload: bool = False
    budget: int | str | None = None
    storage: Literal["int8", "int4"] | None = None
    linear: WTACRS | None = None
    activation: Literal["recompute", "invert", "precision_bit", "few_bit", "stock"] = "recompute"
    few_bits: int = 4
    norm: Literal["recompute", "output", "stock"] = "recompute"
    dropout: Literal["auto", "seed", "mask", "stock"] = "auto"
    attention: Literal["recompute", "stock"] = "recompute"
    lora: Literal["recompute", "stock"] = "recompute"
    frozen: bool = True
    loss: Literal["chunked", "stock"] = "chunked"
    backend: Literal["torch", "auto", "triton"] = "torch"
    compile: bool = False
    layers: Mapping[str, float] | tuple[tuple[str, float], ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _as_pairs(self.layers))
        for name, hint in get_type_hints(MemSaveConfig).items():
            names = [value for one in (hint, *get_args(hint)) if get_origin(one) is Literal for value in get_args(one)]
            allowed = [None, *names] if type(None) in get_args(hint) else names
            is_any = not names or name == "tiles"
            self._expect(name, is_any or getattr(self, name) in allowed, f"one of {listed(allowed)}")
        self._expect("few_bits", is_int(self.few_bits) and 1 <= self.few_bits <= 8, "a whole number from 1 to 8")
        for name in ("frozen", "offload", "compile"):
            self._expect(name, isinstance(getattr(self, name), bool), "True or False")
        is_linear = self.linear is None or isinstance(self.linear, WTACRS)
        exact = "Use WTACRS(budget=0.3), or leave it out for exact weight gradients."
        self._expect("linear", is_linear, "None or a WTACRS", exact)
        self._resolve_tiles()
        limits = self.first_blocks("checkpoint") is not None
        if self.budget is not None:
            try:
                bytes_of(self.budget, "MemSaveConfig.budget")
            except PlanError as error:
                raise ConfigError(str(error)) from error
            if self.checkpoint is not None or self.offload or limits:
                given = f"checkpoint={self.checkpoint!r}, offload={self.offload}, layers={dict(self.layers or ())}"
                reason = f"MemSaveConfig.budget={self.budget!r} chooses checkpoint and offload, got {given}."
                raise ConfigError(reason, "Leave out either the budget or those.")
        elif self.checkpoint is None and limits:
            reason = "MemSaveConfig.layers['checkpoint']: expected a checkpoint= that it limits, got none."
            raise ConfigError(reason, "Use checkpoint='gate' or another rung with it.")
        if self.compile:
            self._refuse_beside_compile()
        if self.storage is not None and self.activation == "precision_bit":
            raise ConfigError(
                f"MemSaveConfig.storage={self.storage!r} rounds the last bit of what it keeps, got "
                "activation='precision_bit', which keeps a bit there. Use activation='invert', or leave storage out."
            )

    def _expect(self, name: str, is_right: bool, expected: str, remedy: str = "") -> None:
        if not is_right:
            remedy = remedy or f"Leave it out for the default, {getattr(MemSaveConfig, name)!r}."
            raise ConfigError(f"MemSaveConfig.{name} must be {expected}, got {getattr(self, name)!r}. {remedy}")

    def _resolve_tiles(self) -> None:
        """Set ``tiles`` and ``checkpoint`` to go together; raise ConfigError where they cannot."""
        is_size = is_int(self.tiles) and self.tiles >= 1
        expected = "None, 'auto' or a whole number of tokens, 1 or more"
        self._expect("tiles", self.tiles in (None, "auto") or is_size, expected, "Use 'auto', or leave it out.")
        if self.tiles is not None and self.checkpoint not in (None, "tiles"):
            expected = f"MemSaveConfig.tiles={self.tiles!r} runs whole blocks again, MLPs on parts of the tokens"
            raise ConfigError(f"{expected}, got checkpoint={self.checkpoint!r} beside it. Leave out one of the two.")
        if self.tiles is None and self.checkpoint != "tiles":
            return
        object.__setattr__(self, "checkpoint", "tiles")
        object.__setattr__(self, "tiles", self.tiles or "auto")
        found = {name: getattr(self, name) for name in ("storage", "linear", "compile")}
        if given := [f"{name}={value!r}" for name, value in found.items() if value]:
            what = "keeps a block's input alone, exactly, and runs its MLPs on parts of the tokens"
            reason = f"MemSaveConfig.checkpoint='tiles' {what}, got {', '.join(given)}."
            raise ConfigError(reason, "Use checkpoint='block', or leave that out.")

    def _refuse_beside_compile(self) -> None:
        """Raise ConfigError for fields that a compiled block cannot heed."""
        found = {name: getattr(self, name) for name in ("offload", "budget", "storage", "linear", *KINDS, "backend")}
        harmless = {"dropout": ("seed", "mask", "auto"), "backend": ("torch", "auto")}
        given = [f"{n}={v!r}" for n, v in found.items() if v not in harmless.get(n, (getattr(MemSaveConfig, n),))]
        given += [f"layers[{kind!r}]" for kind in dict(self.layers or ()) if kind != "checkpoint"]
        if got := ", ".join(given):
            reason = f"MemSaveConfig.compile=True leaves to the compiler what a block computes and keeps, got {got}."
            raise ConfigError(reason, f"Leave out compile, or {'that' if len(given) == 1 else 'those'}.")

    @classmethod
    def resolve(
        cls, value: MemSaveLike | None, fields: Mapping[str, Any] | None = None, *, may_plan: bool = False
    ) -> MemSaveConfig | None:
        """Return the config that ``memsave=`` means, with ``fields`` set in it, None for False; else ConfigError."""
        # A budget is for callers that know a batch size and a sequence length: ``may_plan``.
        if value is None or value is False:
            return None
        if isinstance(value, cls):
            found = value
        elif value is True or isinstance(value, dict):
            found = cls.from_dict({} if value is True else value)
        elif isinstance(value, (str, Path)):
            found = cls.named(value)
        else:
            expected = "True, False, a preset's name, a YAML or JSON file, a dict of fields or a MemSaveConfig"
            reason = f"memsave must be {expected}, got {type(value).__name__}."
            raise ConfigError(reason, "Use memsave=True for the exact default.")
        if fields:
            rung = fields.get("checkpoint", found.checkpoint)
            if found.checkpoint not in (None, rung):
                expected = f"checkpoint={rung!r}: expected a preset or config without a checkpoint of its own"
                raise ConfigError(f"{expected}, got {found.checkpoint!r}. Leave out one of the two.")
            found = replace(found, **fields)
        if found.budget is not None and not may_plan:
            raise ConfigError(
                f"MemSaveConfig.budget={found.budget!r}: expected a batch size and a sequence length to plan for, got "
                "none here.",
                f"Use hf_memsave.plan(model, budget={found.budget!r}, batch_size=..., seq_len=...).config, or give it "
                "to a trainer, which knows both: Trainer(..., memsave=MemSaveConfig(budget=...)).",
                option=f"Use memsave plan --budget {found.budget} --out FILE, and name that file.",
            )
        return found

    @classmethod
    def named(cls, name: str | Path) -> MemSaveConfig:
        """Return the preset of this name, or the config in the file of this name."""
        is_file = str(name).endswith((".yaml", ".yml", ".json")) or Path(name).is_file()
        if isinstance(name, Path) or (is_file and name not in (*RUNGS, *presets())):
            return cls.from_file(name)
        return cls.preset(name)

    @classmethod
    def preset(cls, name: str) -> MemSaveConfig:
        """Return the config in ``hf_memsave/presets/<name>.yaml``, or with the rung ``name``; else ConfigError."""
        found = presets()
        if name in RUNGS:
            return cls.from_dict({"checkpoint": name})
        if name not in found:
            near = did_you_mean([name], (*found, *RUNGS))
            raise ConfigError(
                f"unknown preset {name!r}: expected one of {listed((*found, *RUNGS))}, or a .yaml or .json file.",
                near or "Use memsave=True for the exact default, or MemSaveConfig(...) to choose each field.",
                near or "Leave --memsave out for the exact default, or name a file with fields: 'checkpoint: gate'.",
            )
        return cls.from_dict(yaml.safe_load(found[name].read_text(encoding="utf-8")) or {})

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> MemSaveConfig:
        """Return the config with these fields, the others at their defaults; ConfigError for what is not allowed."""
        if not isinstance(fields, dict):
            raise ConfigError(f"expected a mapping such as {{'norm': ...}}, got {type(fields).__name__}: {fields!r}.")
        refuse_unknown(cls, fields)
        if isinstance(linear := fields.get("linear"), dict):
            refuse_unknown(WTACRS, linear)
            fields = {**fields, "linear": WTACRS(**linear)}
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Return every field, as JSON and YAML know it."""
        fields = asdict(self) | {"layers": dict(self.layers) if self.layers else None}
        return dict(json.loads(json.dumps(fields)))

    @classmethod
    def from_file(cls, path: str | Path) -> MemSaveConfig:
        """Read the config that :meth:`to_file` wrote; raise ConfigError if the file is missing, empty or wrong."""
        fields = fields_of(path)
        try:
            return cls.from_dict(fields)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def to_file(self, path: str | Path) -> None:
        """Write JSON where the name ends in ``.json``, else YAML; an OSError leaves the file that was there."""
        text = json.dumps(self.to_dict(), indent=2) if str(path).endswith(".json") else yaml.safe_dump(self.to_dict())
        write(path, text)

    @property
    def is_exact(self) -> bool:
        """Whether gradients are mathematically stock's; bits differ by chunked losses, tiles, Triton and compile."""
        return not self.inexact

    @property
    def inexact(self) -> tuple[str, ...]:
        """The fields by which gradients differ from stock's mathematically, as Python code."""
        fields = {"activation": self.activation, "norm": self.norm, "storage": self.storage}
        found = [f'{name}="{value}"' for name, value in fields.items() if value not in (None, "recompute", "stock")]
        return tuple(found if self.linear is None else [*found, f"linear=WTACRS(budget={self.linear.budget})"])

    def converts(self, kind: str, block: int, blocks: int = 0) -> bool:
        """Return whether sites of this kind are converted in repeated block number ``block`` of ``blocks``."""
        first = self.first_blocks(kind)
        if isinstance(first, float):
            first = math.ceil(first * blocks)
        return getattr(self, kind) not in ("stock", None) and (first is None or block < first)

    def first_blocks(self, kind: str | None) -> float | None:
        """Return in how many first blocks, or in what fraction, sites of this kind are converted; None for all."""
        return dict(self.layers or ()).get(kind or "")


#: What ``memsave=`` takes: True for the default, False for none, a preset's name, a file, a dict of fields, a config.
MemSaveLike = MemSaveConfig | str | Path | bool | dict[str, Any]


def _as_pairs(layers: Any) -> tuple[tuple[str, float], ...] | None:
    """Return ``layers`` as sorted, hashable pairs, or None where nothing is limited; else raise ConfigError."""
    if layers is None:
        return None
    remedy = "Use layers={'norm': 6}, or leave it out to convert every block."
    try:
        pairs = dict(layers) if isinstance(layers, (Mapping, tuple)) else None
    except (TypeError, ValueError):
        pairs = None
    if pairs is None:
        raise ConfigError(f"MemSaveConfig.layers must be a mapping or None, got {layers!r}. {remedy}")
    for kind, number in pairs.items():
        if kind not in LIMITED:
            raise ConfigError(f"MemSaveConfig.layers: expected kinds {listed(LIMITED)}, got {kind!r}. {remedy}")
        expected = "a whole number of blocks, 0 or more"
        is_right = is_int(number) and number >= 0
        if kind == "checkpoint" and isinstance(number, float):
            expected = "a whole number of blocks, or a part of them from 0.0 to 1.0"
            is_right = 0 <= number <= 1
            remedy = "Use 0.5 for the first half, or leave it out for all blocks."
        if not is_right:
            raise ConfigError(f"MemSaveConfig.layers[{kind!r}] must be {expected}, got {number!r}. {remedy}")
    return tuple(sorted(pairs.items())) or None
