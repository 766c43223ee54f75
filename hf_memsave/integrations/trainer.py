"""``MemSaveCallback`` for the stock Trainer and TRL's trainers; ``MemSaveTrainer``, and a mixin for any other.

Patching happens as a trainer is made, and once more as training begins: by then ``model_init`` may have built another
model, and adapters may have been added.
"""

from __future__ import annotations

import base64
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load, save
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from hf_memsave.config.config import MemSaveConfig, MemSaveLike
from hf_memsave.config.sizes import GIB
from hf_memsave.errors import ConfigError
from hf_memsave.logs import logger
from hf_memsave.patching.patch import patch, unpatch
from hf_memsave.patching.sampled_layers import sampler_of
from hf_memsave.patching.swap import hides_forward, is_patched, patched_models


class MemSaveCallback(TrainerCallback, ExportableState):
    """A callback that patches the trainer's model, and adds what that frees to every logged loss.

    With the loss come ``memsave/kept_gib``, what the first micro-batch of training on this process kept for backward,
    and ``memsave/freed_fraction``, the share of what stock would have kept (0 to 1) that it did not, where that was
    counted; under ``offload`` ``memsave/offloaded_gib`` (in main memory), and on a GPU ``memsave/peak_gib``, the most
    that PyTorch had allocated so far. The first logged loss has ``memsave/freed_gib/<kind>`` as well, such as
    ``memsave/freed_gib/dropout_masks``. All are in the trainer's history and go to TensorBoard, W&B and the like: among
    a trainer's callbacks this one comes first. With ``HF_MEMSAVE_NO_HOOKS=1`` only :meth:`add_to` and
    :class:`MemSaveMixin` put it there; in ``callbacks=`` it is then behind the reporters, which log before it.

    The norms that sampled linears draw by are in the callback's state in a checkpoint, and a resumed run goes on with
    them; a table of samples (``WTACRS(cache="sample_idx")`` or ``"content"``) starts over, as unbiased.

    Args:
        memsave: As for :func:`hf_memsave.patch`: True, a preset's name, a file, a dict of fields or a
            ``MemSaveConfig``. None for what the model is patched with already, or else the exact default.
        undo: Make the model stock again when training ends.

    Attributes:
        report: The report of the latest patch; None before the first, and where a budget= found that stock fits.
        metrics: What is logged with every loss.

    Raises:
        ConfigError: ``memsave`` names a preset, field or value that does not exist, or asks for nothing.
        PatchError: When the trainer is made or training begins, if the model is patched with another config.
    """

    def __init__(self, memsave: MemSaveLike | None = None, undo: bool = False) -> None:
        self._takes_what_is_there = memsave is None
        config = MemSaveConfig() if memsave is None else MemSaveConfig.resolve(memsave, may_plan=True)
        if config is None:
            raise ConfigError(f"MemSaveCallback({memsave!r}) asks for nothing. Leave the callback out for a stock run.")
        self.config, self.undo = config, undo
        self.report: Any = None
        self.metrics: dict[str, float] = {}
        self._model: Callable[[], nn.Module | None] = lambda: None

    def add_to(self, trainer: Trainer) -> None:
        """Add this callback to a trainer before all others, one at most; ConfigError for one with another config."""
        callbacks = trainer.callback_handler.callbacks
        there = next((c for c in callbacks if isinstance(c, MemSaveCallback)), None)
        if there is None:
            callbacks.insert(0, self)
            self.on_init_end(trainer.args, trainer.state, trainer.control, trainer.model)
        elif not self._takes_what_is_there and self.config != there.config:
            found = f"The trainer has MemSaveCallback({there.config}) in callbacks="
            raise ConfigError(f"{found}, and got memsave={self.config} as well. Leave out one of the two.")
        else:
            callbacks.insert(0, callbacks.pop(callbacks.index(there)))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of this callback: its arguments, and the norms of sampled linears."""
        memsave = None if self._takes_what_is_there else self.config.to_dict()
        model, norms = self._model(), None
        if model is not None and (sampler := sampler_of(model)) is not None:
            learned = {n: t.contiguous() for n, t in sampler.state_dict().items() if not n.endswith("/samples")}
            norms = base64.b64encode(save(learned)).decode("ascii")
        return {"args": {"memsave": memsave, "undo": self.undo}, "attributes": {"norms": norms}}

    def on_init_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Patch the model the trainer was made with."""
        self._patch(args, model)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Patch modules added since the trainer was made, and load the norms of a checkpoint."""
        self._patch(args, model, kwargs.get("train_dataloader"))
        if args.torch_compile and self.report is not None:
            self.report.step.uncounted = "torch_compile=True compiles the model"
            logger.info("torch_compile=True: the patched model is compiled, and what its steps keep is not counted.")
        self.metrics = {}
        saved = state.stateful_callbacks.setdefault(type(self).__name__, {})  # a stock run's checkpoint has none
        saved = saved[-1] if isinstance(saved, list) else saved
        if state.global_step and self.config.linear is not None:
            text, sampler = saved.get("attributes", {}).get("norms"), sampler_of(model)
            if text is not None and sampler is not None:
                device = next((p.device for p in model.parameters()), torch.device("cpu"))
                sampler.load_state_dict(load(base64.b64decode(text)), device)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Add the figures to a logged loss, for the callbacks after this one and for the history."""
        if logs is None or "loss" not in logs or self.report is None:
            return
        step, once = self.report.step, {}
        if step.is_counted:
            if "memsave/kept_gib" not in self.metrics and not step.uncounted:
                kinds = {kind.replace("'", "").replace(" ", "_"): n for kind, n in step.by_kind("avoided").items()}
                once = {f"memsave/freed_gib/{kind}": n / GIB for kind, n in kinds.items()}
            self.metrics = {"memsave/kept_gib": step.nbytes_kept / GIB}
            if not math.isnan(step.freed_fraction):
                self.metrics["memsave/freed_fraction"] = step.freed_fraction
            if self.report.config.offload:
                self.metrics["memsave/offloaded_gib"] = step.nbytes_offloaded / GIB
        if args.device.type == "cuda":
            self.metrics["memsave/peak_gib"] = torch.cuda.max_memory_allocated(args.device) / GIB
        for log in (logs, *state.log_history[-1:]):
            log.update(self.metrics | once)

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Make the model stock again, if asked to."""
        if self.undo:
            unpatch(model)

    def _patch(self, args: TrainingArguments, model: nn.Module, batches: Any = None) -> None:
        config: MemSaveConfig | None = self.config
        if self.config.budget is not None:
            if batches is None:  # as the trainer is made: how long its rows are is not known yet
                return
            from hf_memsave.planner.budget import plan_for

            instead = " (in place of the patch that was there)" * bool(patched_models(model))
            unpatch(model)
            plan = plan_for(self.config, model, args, batches)
            logger.info("hf_memsave: the plan for budget=%r%s:\n%s", self.config.budget, instead, plan)
            config = plan.config
        elif self._takes_what_is_there and (found := patched_models(model)):
            self.config = config = found[0][1]
        self.report, self._model = None if config is None else patch(model, config), weakref.ref(model)


class _Uncover(TrainerCallback):
    """Patch a patched model again, as training begins, if a forward hides ours since: TRL's, or Liger-Kernel's."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        for module, config in patched_models(model):
            if any(is_patched(part) and hides_forward(part) for part in module.modules()):
                patch(module, config)


def without_callback(trainer: Any, memsave: Any) -> None:
    """Unpatch a trainer's model for ``memsave=False`` with no callback; else have no other forward hide ours."""
    if (model := getattr(trainer, "model", None)) is None or not patched_models(model):
        return
    if memsave is False and not any(isinstance(c, MemSaveCallback) for c in trainer.callback_handler.callbacks):
        unpatch(model)
        logger.info("memsave=False: the model was patched, and is stock again. hf_memsave.patch(model) patches it.")
        return
    if not any(isinstance(c, _Uncover) for c in trainer.callback_handler.callbacks):
        trainer.add_callback(_Uncover())


class MemSaveMixin:
    """A mixin for trainers that takes the argument ``memsave``: ``class MyTrainer(MemSaveMixin, SFTTrainer)``.

    Args:
        memsave: As for :class:`MemSaveCallback`; False for a stock run, also of a model that was patched before.
        *args, **kwargs: The trainer's own.

    Raises:
        ConfigError: As for :class:`MemSaveCallback`.
    """

    def __init__(self, *args: Any, memsave: MemSaveLike | None = None, **kwargs: Any) -> None:
        config = MemSaveConfig.resolve(memsave, may_plan=True)  # a wrong name must not cost a download
        super().__init__(*args, **kwargs)
        if memsave is False:
            without_callback(self, memsave)
        else:
            MemSaveCallback(config).add_to(self)


class MemSaveTrainer(MemSaveMixin, Trainer):
    """``transformers.Trainer`` with the argument ``memsave``."""
