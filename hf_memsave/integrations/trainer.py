"""``MemSaveCallback`` for the stock Trainer and TRL's trainers; ``MemSaveTrainer``, and a mixin for any other.

Patching happens as a trainer is made, and once more as training begins: by then ``model_init`` may have built another
model, and adapters may have been added. What the first training step keeps is counted as it happens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from hf_memsave.config import MemSaveConfig
from hf_memsave.errors import ConfigError, PatchError
from hf_memsave.integrations.norms import load_norms, save_norms
from hf_memsave.patching.patch import patch, unpatch
from hf_memsave.patching.sampled_layers import sampler_of
from hf_memsave.patching.swap import patched_models
from hf_memsave.tape.ledger import Ledger

_MIB = 2**20
#: Functions that are named after the first step.
_TOP = 8


class MemSaveCallback(TrainerCallback):
    """Patches the trainer's model, prints the report once, and logs what it frees to everything in ``report_to``.

    Checkpoints get a file with the norms that sampled linears draw by, and a resumed run goes on with them.

    With every logged loss come ``memsave/kept_mib`` and ``memsave/freed_mib``, counted in the first training step (its
    first micro-batch, on this process), and on a GPU ``memsave/peak_mib``, the most that PyTorch had allocated so far.
    After that step, one line says which functions' results are not kept, and the first logged loss has them too, as
    ``memsave/avoided_mib/<function>``.

    Args:
        memsave: As for :func:`hf_memsave.patch`: True, a preset's name, a dict of fields or a ``MemSaveConfig``. None
            for what the model is patched with already, or else the exact default.
        undo: Make the model stock again when training ends.

    Attributes:
        report: Of the last time the model was patched; None before.
        metrics: What is logged with every loss.

    Raises:
        ConfigError: ``memsave`` names a preset, field or value that does not exist, or asks for nothing.
    """

    def __init__(self, memsave: MemSaveConfig | str | bool | dict[str, Any] | None = None, undo: bool = False) -> None:
        self._takes_what_is_there = memsave is None
        config = MemSaveConfig() if memsave is None else MemSaveConfig.resolve(memsave)
        if config is None:
            raise ConfigError(f"MemSaveCallback({memsave!r}) asks for nothing. Leave the callback out for a stock run.")
        self.config, self.undo = config, undo
        self.report: Any = None
        self.metrics: dict[str, float] = {}
        self._avoided: dict[str, float] | None = None  # by function; None before the first step, empty once logged

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        handler: CallbackHandler | None = None,
        **kwargs: Any,
    ) -> None:
        """Patch the model the trainer was made with; ``handler`` calls us, if it does not do so itself."""
        self._check(args, handler or _calling_handler())
        self._patch(state, model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        """Patch what came since."""
        self._check(args, _calling_handler())
        self._patch(state, model)
        self.metrics, self._avoided = {}, None
        checkpoint = _calling("resume_from_checkpoint", str)
        if checkpoint is not None and state.global_step and sampler_of(model) is not None:
            load_norms(model, checkpoint)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        """Put into the checkpoint what sampled linears draw by."""
        trainer = _calling("self", Trainer)
        folder = args.output_dir if trainer is None else trainer._get_output_dir(trial=_calling("trial", object))
        save_norms(model, Path(folder) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        """After the first step, say what it avoided to keep."""
        step = self.report.step
        if self._avoided is None and step.nbytes_kept:
            self._avoided = {name: n / _MIB for name, n in list(step.by_function("avoided").items())[:_TOP]}
            if state.is_world_process_zero:
                print(_line(step, self._avoided))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the figures to a logged loss, for the callbacks after this one and for the history."""
        if logs is None or "loss" not in logs:
            return
        step = self.report.step
        if step.nbytes_kept:
            self.metrics = {
                "memsave/kept_mib": step.nbytes_kept / _MIB,
                "memsave/freed_mib": step.nbytes_avoided / _MIB,
            }
        if args.device.type == "cuda":
            self.metrics["memsave/peak_mib"] = torch.cuda.max_memory_allocated(args.device) / _MIB
        once = {f"memsave/avoided_mib/{name}": mib for name, mib in (self._avoided or {}).items()}
        self._avoided = None if self._avoided is None else {}
        for log in (logs, *state.log_history[-1:]):
            log.update(self.metrics | once)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **kwargs: Any
    ) -> None:
        """Undo, if asked to."""
        if self.undo:
            unpatch(model)

    def _check(self, args: TrainingArguments, handler: CallbackHandler | None) -> None:
        if args.use_liger_kernel:
            raise PatchError(
                "use_liger_kernel=True and hf_memsave both replace the model's forwards, and cannot be combined. Set "
                "use_liger_kernel=False, or leave MemSaveCallback out."
            )
        if handler is None:
            return
        for other in handler.callbacks:
            if isinstance(other, MemSaveCallback) and other.config != self.config:
                raise ConfigError(
                    f"this trainer has two MemSaveCallbacks with different configs, {other.config} and {self.config}. "
                    "Expected one config for a model: remove one of them."
                )
        # First of all, so that the reporters, which come before any callback of the user's, get what we add to a log.
        handler.callbacks.remove(self)
        handler.callbacks.insert(0, self)

    def _patch(self, state: TrainerState, model: nn.Module) -> None:
        first = self.report is None
        if self._takes_what_is_there and (found := patched_models(model)):
            self.config = found[0][1]
        self.report = patch(model, self.config)
        if first and state.is_world_process_zero:
            print(self.report)


def _line(step: Ledger, avoided: dict[str, float]) -> str:
    """What a first step kept and avoided, and by which functions."""
    kept, freed = step.nbytes_kept / _MIB, step.nbytes_avoided / _MIB
    names = ", ".join(f"{name} {mib:.3g}" for name, mib in avoided.items()) or "nothing"
    return f"hf_memsave: the first step kept {kept:.3g} MiB and avoided {freed:.3g}: {names}"


def _calling_handler() -> CallbackHandler | None:
    """Who is calling a callback: a trainer tells it nothing of the others."""
    return _calling("self", CallbackHandler)


def _calling(name: str, kind: type) -> Any:
    """The innermost variable of that name and kind in what is calling: a trainer tells its callbacks little."""
    frame = sys._getframe()
    while frame is not None and not (name in frame.f_locals and isinstance(frame.f_locals[name], kind)):
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_locals[name]


class MemSaveMixin:
    """Gives a trainer class the argument ``memsave``: ``class MyTrainer(MemSaveMixin, SFTTrainer)``.

    Args:
        memsave: As for :class:`MemSaveCallback`; False for a stock run.
        *args: The trainer's own.
        **kwargs: The trainer's own.

    Raises:
        ConfigError: As for :class:`MemSaveCallback`.
    """

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    model: nn.Module
    callback_handler: CallbackHandler
    add_callback: Callable[..., None]

    def __init__(
        self, *args: Any, memsave: MemSaveConfig | str | bool | dict[str, Any] | None = True, **kwargs: Any
    ) -> None:
        config = MemSaveConfig.resolve(memsave)  # a wrong name must not cost a download
        super().__init__(*args, **kwargs)
        if config is not None:
            callback = MemSaveCallback(config)
            self.add_callback(callback)
            callback.on_init_end(self.args, self.state, self.control, self.model, self.callback_handler)


class MemSaveTrainer(MemSaveMixin, Trainer):
    """``transformers.Trainer`` with the argument ``memsave``."""
