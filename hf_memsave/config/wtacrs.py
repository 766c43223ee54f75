"""``WTACRS``: which linears are sampled, how, and from how many rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from hf_memsave.config.fields import named_fields
from hf_memsave.errors import ConfigError


@named_fields
@dataclass(frozen=True, kw_only=True)
class WTACRS:
    """Sampled weight gradients of linears, for :attr:`MemSaveConfig.linear`: unbiased, noisy, and from fewer rows.

    Source: Liu et al. (2023), arXiv:2305.15265.

    Attributes:
        budget: Share of the batch's real tokens (rows) that each weight gradient is computed from, in (0, 1]. Above
            15/16 all are taken: sampling would keep no less.
        estimator: "wta" (Eq. 6), "crs" (Eq. 5: more noise), or "topk" (the rows of largest probability, unscaled:
            biased, to compare).
        targets: Linears to sample, by name or by a part of their path ("q_proj", "lora_A", "encoder.layer.0"); None for
            all in repeated blocks whose sampling frees bytes. Of LoRA, lora_A is sampled; lora_B only if named.
        cache: What predicts a row's gradient norm: "position" (a running profile by layer and position, a few KB);
            also the sample's own last norm, found by the batch's column "sample_idx" or by a hash of its tokens
            ("content"); or None (rows are drawn by the norm of the activation alone).
        samples: For "sample_idx", the number of samples; for "content", the number of the table's slots (262,144): at
            most a byte for each and each sampled linear.
        minimum: Fewest rows to sample; a batch with no more real tokens than that is exact.
        seed: Seed of the draws, which never touch the model's own generators.
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
        is_number = isinstance(self.budget, float) or is_int(self.budget)
        names = isinstance(self.targets, tuple) and self.targets and all(t and isinstance(t, str) for t in self.targets)
        caches = ("position", "sample_idx", "content", None)
        has_samples = is_int(self.samples) and self.samples >= 1
        expect = self._expect
        expect("budget", is_number and 0 < self.budget <= 1, "a number in (0, 1]", "0.3")
        expect("estimator", self.estimator in ("wta", "crs", "topk"), "'wta', 'crs' or 'topk'", "'wta'")
        expect("targets", self.targets is None or names, "names of linears, or None for all", "('q_proj',), or None")
        expect("cache", self.cache in caches, "'position', 'sample_idx', 'content' or None", "'position'")
        expect("minimum", is_int(self.minimum) and self.minimum >= 1, "a whole number of at least 1", "10")
        expect("seed", is_int(self.seed) and self.seed >= 0, "a whole number of at least 0", "0")
        expect("attention", isinstance(self.attention, bool), "True or False", "False")
        if self.cache == "sample_idx":
            needed = "the number of training samples, since cache='sample_idx' asks for a table of them"
            expect("samples", has_samples, needed, "samples=len(train_dataset)")
        is_right = self.samples is None or self.cache == "sample_idx" or (self.cache == "content" and has_samples)
        expect("samples", is_right, "None, or with cache='content' a number of slots", "None")

    def _expect(self, name: str, is_right: Any, expected: str, remedy: str) -> None:
        if not is_right:
            raise ConfigError(f"WTACRS.{name}: expected {expected}, got {getattr(self, name)!r}. Use {remedy}.")


def is_int(value: Any) -> TypeGuard[int]:
    """Return whether ``value`` is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)
