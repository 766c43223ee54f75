"""``MemSaveConfig``: what to keep for backward, in one frozen, strict, serializable place."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, TypeGuard, get_args, get_origin, get_type_hints

import yaml

from hf_memsave.errors import ConfigError

#: The fields that :attr:`MemSaveConfig.layers` can limit.
KINDS = ("activation", "norm", "dropout", "attention", "lora")


@dataclass(frozen=True, kw_only=True)
class WTACRS:
    """Sampled weight gradients of linears, for :attr:`MemSaveConfig.linear`: unbiased, noisy, and from fewer rows.

    Source: Liu et al. (2023), arXiv:2305.15265.

    Attributes:
        budget: Rows (tokens) that each weight gradient is made from, over all real tokens of the batch: in (0, 1].
            Above 15/16 all are taken: drawing would keep no less.
        estimator: "wta" (Eq. 6), "crs" (Eq. 5: unbiased, more noise), or "topk" (the rows of largest probability,
            unscaled: biased, to compare).
        targets: Linears to sample, by name or by a part of their path ("q_proj", "lora_A", "encoder.layer.0"); None for
            all in repeated blocks. Where a target has LoRA, its lora_A is sampled. lora_B is sampled only if named.
        cache: What predicts a row's gradient norm: "position" (a running profile by layer and position, a few KB);
            also the sample's own last norm, found by the batch's column "sample_idx" or by a hash of its tokens
            ("content"); or None (rows are drawn by the norm of the activation alone).
        samples: For "sample_idx": how many samples there are. For "content": how many slots the table has, 262,144 if
            None. The table takes a byte a sample and sampled linear.
        minimum: Fewest rows; a batch with no more real tokens than its rows is exact.
        seed: Of the draws, which never touch the model's own generators. Layers patched one by one draw alike unless
            theirs differ.
        attention: Also sample both products of eager attention (their four operand gradients).
    """

    budget: float = 0.3
    estimator: Literal["wta", "crs", "topk"] = "wta"
    targets: tuple[str, ...] | None = None
    cache: Literal["position", "sample_idx", "content"] | None = "position"
    samples: int | None = None
    minimum: int = 10
    seed: int = 0
    attention: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.targets, list):
            object.__setattr__(self, "targets", tuple(self.targets))
        is_number = isinstance(self.budget, (int, float)) and not isinstance(self.budget, bool)
        self._expect("budget", is_number and 0 < self.budget <= 1, "a number in (0, 1]", "0.3")
        self._expect("estimator", self.estimator in ("wta", "crs", "topk"), "'wta', 'crs' or 'topk'", "'wta'")
        names = isinstance(self.targets, tuple) and self.targets and all(t and isinstance(t, str) for t in self.targets)
        self._expect("targets", self.targets is None or names, "names of linears, or None for all in blocks", "None")
        caches = ("position", "sample_idx", "content", None)
        self._expect("cache", self.cache in caches, "'position', 'sample_idx', 'content' or None", "'position'")
        self._expect("minimum", _is_int(self.minimum) and self.minimum >= 1, "a whole number of at least 1", "10")
        self._expect("seed", _is_int(self.seed) and self.seed >= 0, "a whole number of at least 0", "0")
        self._expect("attention", isinstance(self.attention, bool), "True or False", "False")
        if self.cache == "sample_idx":
            needed = "the number of training samples, since cache='sample_idx' asks for a table of them"
            self._expect("samples", _is_int(self.samples) and self.samples >= 1, needed, "samples=len(train_dataset)")
        elif self.samples is not None:
            fits = self.cache == "content" and _is_int(self.samples) and self.samples >= 1
            self._expect("samples", fits, "None, or with cache='content' a number of slots", "None")

    def _expect(self, name: str, is_right: Any, expected: str, remedy: str) -> None:
        if not is_right:
            raise ConfigError(f"WTACRS.{name}: expected {expected}, got {getattr(self, name)!r}. Use {remedy}.")


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class MemSaveConfig:
    """What to keep instead of each kind of tensor. The defaults are exact: same loss and gradients, to the bit.

    Attributes:
        activation: Outputs of activations and gates: recomputed from their inputs, or kept as stock does. Not exact:
            "invert" (the output and one bit an element are kept, and the slope is read off them), "precision_bit" (the
            bit in the output's last one), "few_bit" (:attr:`few_bits` bits of the slope alone where nobody wants the
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
        linear: Weight gradients of linears: exact (None), or unbiased from a sample of rows (:class:`WTACRS`).
        storage: What still has to be kept: as it is (None), or activations in about 8 ("int8") or 4.5 bits ("int4") an
            element, rounded at random. Not exact: the weight gradient of a linear that keeps its own input is unbiased,
            the others are approximate. What is promised keeps nothing; of the rest a sampled linear keeps rows, a
            rectifier, few-bit activation or boolean bits; what floating-point activation then remains is coded, once.
        layers: How many blocks to convert of each kind, such as ``{"activation": 6, "norm": 12, "dropout": 0}``: in the
            first so many repeated blocks of the model (an encoder's before a decoder's) the field of that name holds,
            elsewhere those modules stay stock. Kinds that are not named, and all with None, are converted everywhere.
            What lies outside every block (embeddings, a last norm, a head) goes with the first block. SDPA is chosen
            for a whole model: any number but 0 converts it in every block. Held as sorted pairs.
    """

    activation: Literal["recompute", "invert", "precision_bit", "few_bit", "stock"] = field(default="recompute")
    few_bits: int = field(default=4)
    norm: Literal["recompute", "output", "stock"] = field(default="recompute")
    dropout: Literal["seed", "mask", "stock"] = field(default="seed")
    attention: Literal["recompute", "stock"] = field(default="recompute")
    lora: Literal["recompute", "stock"] = field(default="recompute")
    frozen: bool = field(default=True)
    linear: WTACRS | None = field(default=None)
    storage: Literal["int8", "int4"] | None = field(default=None)
    layers: Mapping[str, int] | tuple[tuple[str, int], ...] | None = field(default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _as_pairs(self.layers))
        for name, allowed in _choices().items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(
                    f"MemSaveConfig.{name} must be one of {_listed(allowed)}, got {value!r}. "
                    f"Leave it out for the default, {allowed[0]!r}."
                )
        if not (_is_int(self.few_bits) and 1 <= self.few_bits <= 8):
            raise ConfigError(
                f"MemSaveConfig.few_bits must be a whole number from 1 to 8, got {self.few_bits!r}. "
                "Leave it out for the default, 4."
            )
        if not isinstance(self.frozen, bool):
            raise ConfigError(
                f"MemSaveConfig.frozen must be True or False, got {self.frozen!r}. Leave it out for the default, True."
            )
        if not (self.linear is None or isinstance(self.linear, WTACRS)):
            raise ConfigError(
                f"MemSaveConfig.linear must be None or a WTACRS, got {self.linear!r}. Use WTACRS(budget=0.3), or leave "
                "it out for exact weight gradients."
            )
        if self.storage not in (None, "int8", "int4"):
            raise ConfigError(
                f"MemSaveConfig.storage must be None, 'int8' or 'int4', got {self.storage!r}. Leave it out to keep "
                "activations as they are."
            )
        if self.storage is not None and self.activation == "precision_bit":
            raise ConfigError(
                f"MemSaveConfig.storage={self.storage!r} rounds the last bit of what it keeps, got "
                "activation='precision_bit', which keeps a bit there. Use activation='invert', or leave storage out."
            )

    @classmethod
    def resolve(cls, value: MemSaveConfig | str | bool | dict[str, Any] | None) -> MemSaveConfig | None:
        """What a ``memsave=`` argument means.

        Args:
            value: True for the default, a preset's name, a dict of fields, a config, or False.

        Returns:
            The config; None for False and None.

        Raises:
            ConfigError: It names a preset, field or value that does not exist.
        """
        if isinstance(value, cls):
            return value
        if value is None or value is False:
            return None
        if value is True:
            return cls()
        if isinstance(value, str):
            return cls.preset(value)
        if isinstance(value, dict):
            return cls.from_dict(value)
        raise ConfigError(
            f"memsave must be True, False, a preset's name or a MemSaveConfig, got {type(value).__name__}. "
            "Use memsave=True for the exact default."
        )

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
                f"unknown preset {name!r}: expected one of {_listed(found)}. Use memsave=True for the exact default, "
                "or MemSaveConfig(...) to choose each field."
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
        _refuse_unknown(cls, fields)
        if isinstance(linear := fields.get("linear"), dict):
            _refuse_unknown(WTACRS, linear)
            fields = {**fields, "linear": WTACRS(**linear)}
        return cls(**fields)

    def to_dict(self) -> dict[str, Any]:
        """Every field, as JSON and YAML know it."""
        fields = dataclasses.asdict(self) | {"layers": dict(self.layers) if self.layers else None}
        return json.loads(json.dumps(fields))

    def converts(self, kind: str, block: int) -> bool:
        """Whether what is of this kind is converted in the repeated block of this number."""
        first = self.first_blocks(kind)
        return getattr(self, kind) != "stock" and (first is None or block < first)

    def first_blocks(self, kind: str | None) -> int | None:
        """In how many of the first blocks sites of this kind are converted; None for all."""
        return dict(self.layers or ()).get(kind or "")

    @classmethod
    def from_file(cls, path: str | Path) -> MemSaveConfig:
        """Read a JSON or YAML file (every JSON file is a YAML file).

        Returns:
            The config that :meth:`to_file` wrote.

        Raises:
            ConfigError: The file is missing or malformed, or a field or value does not exist.
        """
        try:
            fields = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}. Expected a JSON or YAML file.") from error
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{path} is neither JSON nor YAML: {error}") from error
        return cls.from_dict({} if fields is None else fields)

    def to_file(self, path: str | Path) -> None:
        """Write JSON where the name ends in ``.json``, else YAML."""
        text = json.dumps(self.to_dict(), indent=2) if str(path).endswith(".json") else yaml.safe_dump(self.to_dict())
        Path(path).write_text(text, encoding="utf-8")


def presets() -> dict[str, Any]:
    """Preset name -> its YAML file."""
    packaged = files("hf_memsave") / "configs" / "presets"
    folder = packaged if packaged.is_dir() else Path(__file__).parent.parent / "configs" / "presets"
    return {p.name.removesuffix(".yaml"): p for p in sorted(folder.iterdir(), key=str) if p.name.endswith(".yaml")}


def _as_pairs(layers: Any) -> tuple[tuple[str, int], ...] | None:
    """The canonical form of :attr:`MemSaveConfig.layers`, which can be hashed; None where nothing is limited."""
    if layers is None:
        return None
    remedy = "Use layers={'norm': 6}, or leave it out to convert every block."
    try:
        pairs = dict(layers if isinstance(layers, (Mapping, tuple)) else [layers])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"MemSaveConfig.layers must be a mapping or None, got {layers!r}. {remedy}") from error
    for kind, number in pairs.items():
        if kind not in KINDS:
            raise ConfigError(f"MemSaveConfig.layers: expected kinds {_listed(KINDS)}, got {kind!r}. {remedy}")
        if not (_is_int(number) and number >= 0):
            raise ConfigError(
                f"MemSaveConfig.layers[{kind!r}] must be a whole number of blocks, 0 or more, got {number!r}. {remedy}"
            )
    return tuple(sorted(pairs.items())) or None


def _choices() -> dict[str, tuple[str, ...]]:
    return {name: get_args(h) for name, h in get_type_hints(MemSaveConfig).items() if get_origin(h) is Literal}


def _refuse_unknown(cls: type, fields: dict[str, Any]) -> None:
    known = [f.name for f in dataclasses.fields(cls)]
    if unknown := sorted(fields.keys() - set(known), key=str):
        found = f"{cls.__name__} has no field {_listed(unknown)}: expected {_listed(known)}"
        raise ConfigError(f"{found}. Check the spelling, or leave it out.")


def _listed(names: Any) -> str:
    return ", ".join(repr(name) for name in names)
