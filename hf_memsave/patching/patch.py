"""``patch(model)``: collect what is to change, check all of it, then swap; ``unpatch(model)``: stock again."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from hf_memsave.config.config import MemSaveConfig, MemSaveLike
from hf_memsave.config.sizes import counted, gib, html_table
from hf_memsave.count.kept import Kept, measure_kept
from hf_memsave.errors import ConfigError, PatchError, not_a_module
from hf_memsave.logs import logger, warn_once
from hf_memsave.ops.sampled.sampler import MOST
from hf_memsave.patching.checkpointed import AGAIN, choose_again
from hf_memsave.patching.collect import Found, SiteReport, collect
from hf_memsave.patching.first_step import FIRST, LEDGER, advice, kept, kinds, sentence, trained_in
from hf_memsave.patching.refusals import check
from hf_memsave.patching.rows import forget, reasons
from hf_memsave.patching.sampled_layers import attach, sampler_of
from hf_memsave.patching.swap import is_patched, is_wrapped, patched_class, patched_models, set_class, stock_class
from hf_memsave.patching.taped import BUFFERS, CODED, COMPILED, mark_buffers
from hf_memsave.tape import applied
from hf_memsave.tape.codecs import leave_alone
from hf_memsave.tape.ledger import Ledger
from hf_memsave.tape.quantize import FORMATS

_UNCALLED = (
    "  the model was not called since it was patched, though it got gradients. In a method other than forward (such\n"
    "    as training_step) its repeated blocks alone are covered: patch the module whose forward the method calls.\n"
    "    (What torch.compile compiles is covered, and not counted.)"
)


@dataclass(frozen=True)
class Comparison:
    """The memory that one batch keeps, in stock and patched."""

    stock: Kept
    patched: Kept

    @property
    def freed(self) -> int:
        """Bytes that stock keeps and we do not."""
        return self.stock.total - self.patched.total


class PatchReport:
    """The result of :func:`~hf_memsave.patch`; prints as a few lines.

    Attributes:
        config: What was asked for.
        sites: The models and blocks covered, and every module that is approximated, sampled, fused or left to stock:
            the ``patched`` and the ``skipped`` ones, these for a reason.
        covered: How many models and repeated blocks a tape covers, in words.
        step: What the first forward with gradients, in training mode, kept and avoided; empty before.
    """

    def __init__(self, model: nn.Module, config: MemSaveConfig, sites: Sequence[SiteReport], step: Ledger) -> None:
        self._model = weakref.ref(model)
        self._had_gradients = _has_gradients(model)
        modules, classes = dict(model.named_modules()), dict(_classes(model))
        self.config, self.step = config, step
        self.sites = tuple(replace(site, cls=classes[modules[site.name]]) for site in sites)
        self.patched = tuple(site for site in self.sites if site.status == "patched")
        self.skipped = tuple(site for site in self.sites if site.status == "skipped")
        count = Counter(site.op for site in self.patched)
        self.covered = f"{counted(count['model'], 'model')} and {counted(count['block'], 'repeated block')} covered"

    @property
    def _undone(self) -> str:
        """A heading for a report whose model has been made stock again; else empty."""
        model = self._model()
        return "undone, the model is stock" if model is not None and not patched_models(model) else ""

    @property
    def counts(self) -> Counter[tuple[str, str, str, str]]:
        """(status, op, class, reason) -> how many sites."""
        return Counter((site.status, site.op, site.cls, site.reason) for site in self.sites)

    @property
    def added(self) -> tuple[str, ...]:
        """Paths of modules added since, such as adapters, that the next :func:`patch` of the model covers."""
        model = self._model()
        if model is None or self._undone:
            return ()
        names = {id(module): name for name, module in model.named_modules()}
        found = collect(model, self.config)
        added = () if found.errors else (*found.patches, *found.recomputed)
        return tuple(dict.fromkeys(names[id(module)] for module in added if not _is_changed(module)))

    def undo(self) -> None:
        """Make the model stock again; see :func:`unpatch`."""
        if (model := self._model()) is not None:
            unpatch(model)

    def compare(self, batch: Mapping[str, Any] | Sequence[Any] | Tensor) -> Comparison:
        """Return what ``batch`` keeps, stock and patched, and the bytes freed; the model ends up patched, as it was.

        Raises:
            ReferenceError: The model is gone.
        """
        model = self._model()
        if model is None:
            raise ReferenceError("the model of this report no longer exists. Patch the new one for a new report.")
        unpatch(model)
        try:
            stock = measure_kept(model, batch)
        finally:
            again = patch(model, self.config)
        if self.step.is_counted:
            _wait_with(model, self.step, is_waiting=False)
        else:
            self.step = again.step
        return Comparison(stock, measure_kept(model, batch))

    def _sampling(self) -> list[str]:
        model, config = self._model(), self.config.linear
        sampler = None if model is None else sampler_of(model)
        if config is None or sampler is None or config.budget > MOST:
            return []
        unbiased = "biased" if config.estimator == "topk" else "unbiased"
        what = "weight gradients, and those of attention's products," if config.attention else "weight gradients"
        size = f"; their norms take up to {gib(n)} beside the model" if (n := sampler.cache.nbytes) else ""
        return [f"  {what} from {config.budget:.0%} of the tokens: noisy, and {unbiased}{size}"]

    def _compiled(self) -> list[str]:
        found = Counter((name, getattr(type(m), COMPILED, None)) for m, name in _classes(self._model()))
        lines = [(n, name, b.why_not or counted(b.graphs, "graph")) for (name, b), n in found.items() if b is not None]
        said = "  gradients are exact, but not stock's bits: compiled blocks add in another order and draw other masks"
        return [said, *(f"  compiled {n:>4} x {name}: {what}" for n, name, what in lines)] if lines else []

    def _rows(self) -> list[str]:
        found = Counter((name, why) for m, name in _classes(self._model()) for why in reasons(m))
        return [
            f"  whole {n:>4} x {name}: {why}" if why else f"  in rows {n:>4} x {name}"
            for (name, why), n in sorted(found.items())
        ]

    def _step(self) -> list[str]:
        step = self.step
        if step.uncounted and not step.is_counted:
            return [f"  what it frees is not counted: {step.uncounted}"]
        if not step.is_counted:
            model = self._model()
            is_trained = model is not None and _has_gradients(model) and not self._had_gradients
            return [_UNCALLED if is_trained else "  what it frees is counted in the first training step"]
        lines = [f"  {sentence(step, self.config)}", *(f"  {one}" for one in advice(step, self.config))]
        for what, words in (("kept", "kept"), ("offloaded", "in main memory")):
            if most := kinds(step, what):
                lines.append(f"    {words}: {most}")
        return lines

    def __repr__(self) -> str:
        said = f"the first step {kept(self.step)}" if self.step.is_counted else "no step counted yet"
        return f"<PatchReport: {self._undone or self.covered}; {said}>"

    def _repr_html_(self) -> str:
        columns = [self.step.by_kind(what) for what in ("avoided", "kept", "offloaded")]
        rows = [
            [name, *(gib(column[name]) if name in column else "" for column in columns)]
            for name in columns[0] | columns[1] | columns[2]
        ]
        return html_table(repr(self)[1:-1], [["for backward", "freed", "kept", "in main memory"], *rows])

    def __str__(self) -> str:
        if undone := self._undone:
            return "\n".join([f"hf_memsave: {undone}", *self._step() * self.step.is_counted])
        lines = [f"hf_memsave: {self.covered}, {counted(len(self.skipped), 'module')} skipped"]
        if inexact := self.config.inexact:
            lines.append(f"  gradients are not exact: {', '.join(inexact)}")
        for (status, op, cls, reason), count in sorted(self.counts.items()):
            if status == "skipped" or op not in ("model", "block"):
                lines.append(f"  {status:<8} {count:>4} x {op:<18} {cls}{': ' + reason if reason else ''}")
        lines += self._sampling() + self._compiled() + self._rows()
        if self.config.storage is not None:
            lines.append(f"  activations that are kept are stored in {FORMATS[self.config.storage].bits} bits")
        if added := self.added:
            were = "sites were" if len(added) > 1 else "site was"
            first = f"{added[0] or 'the model itself'}{', ...' * (len(added) > 1)}"
            lines.append(f"  {len(added)} {were} added since ({first}): call patch(model, report.config)")
        return "\n".join(lines + self._step())


def _classes(model: nn.Module | None) -> list[tuple[nn.Module, str]]:
    """Return modules with names of their stock classes: "Block", or "module.Block" if two classes are named so."""
    found = {} if model is None else {module: stock_class(module) for module in model.modules()}
    count = Counter(cls.__name__ for cls in set(found.values()))
    name = {c: c.__name__ if count[c.__name__] == 1 else f"{c.__module__}.{c.__qualname__}" for c in found.values()}
    return [(module, name[cls]) for module, cls in found.items()]


def patch(model: nn.Module, config: MemSaveLike = True, *, replace: bool = False, **fields: Any) -> PatchReport:
    """Make fine-tuning ``model`` keep less memory, in place.

    Idempotent. Parameters, buffers, state dict and class names do not change; the model, its repeated blocks, and
    modules that are approximated, sampled or fused get a subclass of their class. A model that cannot be patched is
    left untouched. A layer may be patched alone, in any model: layers after it keep its output as in stock.

    Example:
        >>> import torch, transformers
        >>> from hf_memsave import patch
        >>> sizes = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2}
        >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=256)).train()
        >>> report, ids = patch(model), torch.ones(4, 32, dtype=torch.long)
        >>> model(input_ids=ids, labels=ids).loss.backward()
        >>> report.covered, report.step.freed_fraction > 0.4
        ('1 model and 2 repeated blocks covered', True)

    Args:
        model: Any module that has parameters or other modules.
        config: True for the exact default, a preset's name, a YAML or JSON file, a dict of fields or a
            :class:`MemSaveConfig`. One whose gradients are not exact is logged.
        replace: Take ``config`` in place of another that the model is patched with, which is an error otherwise.
        **fields: Fields of :class:`MemSaveConfig` to set in ``config``, as in ``patch(model, checkpoint="gate")``.

    Returns:
        What was patched, or skipped and why, and after the first step what that step kept. Print it;
        ``report.undo()`` takes everything back.

    Raises:
        PatchError: The model is no module, or has nothing that autograd could keep a tensor for, another tool has
            patched it already, it is patched with another config, or it cannot have what was asked for.
        ConfigError: ``config`` or ``fields`` name a preset, field or value that does not exist.
    """
    if not isinstance(model, nn.Module):
        raise PatchError(not_a_module("patch(model)", model))
    if "memsave" in fields:
        typed = "" if fields["memsave"] is True else f", {fields['memsave']!r}"
        raise ConfigError(f"patch: expected the config after the model, got memsave=. Use patch(model{typed}).")
    resolved = MemSaveConfig.resolve(config, fields)
    if resolved is None:
        raise PatchError(f"patch(model, {config!r}) asks for nothing. Use patch(model), or unpatch(model) for stock.")
    applied.find()
    found = collect(model, resolved)
    check(model, resolved, found, replace)
    before = found.before
    is_waiting, step = any(LEDGER in module.__dict__ for module, _ in before), _step_of(before)
    inside = {m for covered, _ in before for m in covered.modules() if m is not covered}
    if inside & _swap(model, found) or step is None or {config for _, config in before} != {resolved}:
        is_waiting, step = not resolved.compile, Ledger()
        if resolved.compile:
            step.uncounted = "the repeated blocks are compiled"
            logger.info("compile=True: %s in the first step, and what they keep is not counted.", step.uncounted)
    _wait_with(model, step, is_waiting)
    leave_alone([vars(module) for module in model.modules()])
    if not resolved.is_exact:
        warn_once(f"hf_memsave: gradients are not exact: {', '.join(resolved.inexact)}")
    return PatchReport(model, resolved, found.sites, step)


def report(model: nn.Module) -> PatchReport:
    """Return the report of a patched model, to read what its first step kept; nothing is changed.

    Raises:
        PatchError: The model is no module, or stock, or several of its parts were patched, each by itself.
    """
    if not isinstance(model, nn.Module):
        raise PatchError(not_a_module("report(model)", model))
    patched = patched_models(model)
    if len(patched) != 1:
        got = f"{len(patched)} parts, each patched by itself" if patched else "a stock one"
        remedy = "Report each of its parts." if patched else "Call hf_memsave.patch(model) first."
        raise PatchError(f"report(model): expected a patched {type(model).__name__}, got {got}. {remedy}")
    ((model, config),) = patched
    modules = dict(model.named_modules())
    sites = [s for s in collect(model, config).sites if s.status == "skipped" or _is_changed(modules[s.name])]
    return PatchReport(model, config, sites, _step_of(patched) or Ledger())


def _is_changed(module: nn.Module) -> bool:
    return is_patched(module) or AGAIN in module.__dict__


def unpatch(model: nn.Module) -> None:
    """Give every patched module of ``model`` its stock class back; does nothing to a stock model.

    Raises:
        PatchError: Another tool has put its class over a patched one, and the model stays patched; or it is no module.
    """
    if not isinstance(model, nn.Module):
        raise PatchError(not_a_module("unpatch(model)", model))
    _swap(model, Found())


def _step_of(models: Sequence[tuple[nn.Module, Any]]) -> Ledger | None:
    """Return the ledger of the first step that all ``models`` share; None if they train other parameters by now."""
    steps = {module.__dict__.get(FIRST) for module, _ in models}
    step: Ledger | None = steps.pop() if len(steps) == 1 else None
    is_it = step is not None and (not step.told or any(trained_in(module) in step.told for module, _ in models))
    return step if is_it else None


def _wait_with(model: nn.Module, step: Ledger, is_waiting: bool) -> None:
    """Make ``step`` the first step of all covered models in ``model``; if it ``is_waiting``, it counts the next one."""
    for module, _ in patched_models(model):
        mark_buffers(module)
        module.__dict__[FIRST] = step
        module.__dict__.pop(LEDGER, None)
        if is_waiting:
            module.__dict__[LEDGER] = step


def _swap(model: nn.Module, found: Found) -> set[nn.Module]:
    """Patch the modules of ``model`` that ``found`` names, and give all others their stock classes.

    Returns:
        The modules whose class changes, or whether they run again in backward.

    Raises:
        PatchError: Another tool has put its own class over one of ours that is to change.
    """
    classes = {module: patched_class(patch) for module, patch in found.patches.items()}
    for name, module in model.named_modules():
        if is_wrapped(module) and classes.get(module) not in type(module).__mro__:
            raise PatchError(
                f"cannot undo {name or 'the model'}: another tool (such as FSDP2) has since made its class "
                f"{type(module).__module__}.{type(module).__name__}. Undo before you wrap, or build the model again."
            )
    coded = dict.fromkeys(module for module, patch in found.patches.items() if patch.config and patch.config.storage)
    changed = {module for module in model.modules() if (AGAIN in module.__dict__) != (module in found.recomputed)}
    for module in model.modules():
        cls = classes.get(module, stock_class(module))
        if (compiled := getattr(cls, COMPILED, None)) is not None:
            compiled.why_not = ""  # of an earlier model of this class
        if type(module) is not cls and not is_wrapped(module):
            set_class(module, cls)
            changed.add(module)
        forget(module)
        for name in (BUFFERS, LEDGER, FIRST, CODED):
            if name != CODED or module not in coded:
                module.__dict__.pop(name, None)
    for index, module in enumerate(coded):
        module.__dict__.setdefault(CODED, (index, 0))
    choose_again(model, found.recomputed)
    attach(model)
    return changed


def _has_gradients(model: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in model.parameters())
