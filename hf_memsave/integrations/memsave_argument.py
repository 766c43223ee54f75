"""``memsave=`` on ``from_pretrained`` and ``from_config``, on every trainer, and in PEFT's configs.

Every way of loading a model ends in one of two class methods of ``PreTrainedModel``, which are wrapped. In PEFT
``from_pretrained`` is, and ``BaseTuner.inject_adapter``, which has both model and config. ``Trainer.__init__`` is
wrapped, and so is the ``__init__`` of each subclass, defined before or later, unless it names the argument: it may list
all that it takes, as TRL's do, or drop other keywords. PEFT's ``load_adapter`` and ``TrainingArguments`` say where the
argument goes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

from hf_memsave.errors import ConfigError
from hf_memsave.integrations.hooks import when_imported, wrap
from hf_memsave.logs import logger

if TYPE_CHECKING:  # importing hf_memsave imports this file, and loads nothing that takes long
    from hf_memsave.config.config import MemSaveLike


def install() -> None:
    """Have models, trainers and adapters take ``memsave=``, as importing hf_memsave does, until ``uninstall``."""
    when_imported("transformers.modeling_utils", teach_models)
    when_imported("transformers.training_args", teach_arguments)
    when_imported("transformers.training_args_seq2seq", teach_arguments)
    when_imported("transformers.trainer", teach_trainers)
    when_imported("peft.tuners.tuners_utils", teach_peft)
    when_imported("trl.trainer.sft_config", teach_arguments)
    when_imported("peft.peft_model", teach_adapters)
    when_imported("peft.mixed_model", lambda module: wrap(module.PeftMixedModel, "from_pretrained", _load))


def teach_models(modeling_utils: Any) -> None:
    """Teach ``PreTrainedModel`` the ``memsave`` argument."""
    for name in ("from_pretrained", "_from_config"):
        wrap(modeling_utils.PreTrainedModel, name, _load)


def teach_adapters(peft_model: Any) -> None:
    """Teach ``PeftModel.from_pretrained`` the ``memsave`` argument, which PEFT would ignore."""
    wrap(peft_model.PeftModel, "from_pretrained", _load)
    wrap(peft_model.PeftModel, "load_adapter", _load_adapter)


def _load_adapter(stock: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    if "memsave" in kwargs:
        reason = "load_adapter: expected PEFT's own arguments, got memsave=."
        raise ConfigError(reason, f"Use hf_memsave.patch(model, {kwargs['memsave']!r}), before or after.")
    return stock(self, *args, **kwargs)


def teach_arguments(module: Any) -> None:
    """Have ``TrainingArguments`` and its subclasses, such as TRL's configs, say where ``memsave=`` goes."""
    classes = [sys.modules["transformers.training_args"].TrainingArguments]
    for cls in classes:  # which grows
        classes += cls.__subclasses__()
        if (taken := _parameters_of(cls)) and not any(p.kind is p.VAR_KEYWORD for p in taken):
            wrap(cls, "__init__", _make_arguments)


def _make_arguments(stock: Callable[..., None], self: Any, /, *args: Any, **kwargs: Any) -> None:
    if "memsave" in kwargs:
        from hf_memsave.config.fields import UnknownFieldError

        name = type(self).__name__
        kind = next((name.removesuffix(end) for end in ("TrainingArguments", "Config") if name.endswith(end)), "")
        reason = f"{name} has no field 'memsave': expected it among the trainer's own arguments."
        raise UnknownFieldError(reason, f"Use {kind}Trainer(model, {name}(...), memsave={kwargs['memsave']!r}).")
    stock(self, *args, **kwargs)


def _load(stock: Callable[..., Any], cls: Any, /, *args: Any, memsave: MemSaveLike | None = None, **kwargs: Any) -> Any:
    from transformers import PreTrainedConfig

    from hf_memsave.config.config import MemSaveConfig

    config = MemSaveConfig.resolve(memsave)  # a wrong name must not cost a download
    for given in (*args, kwargs.get("config")):
        if isinstance(given, PreTrainedConfig) and hasattr(given, "memsave"):
            found = f"the model's own config ({type(given).__name__}) has an attribute 'memsave' = {given.memsave!r}"
            reason = f"{found}, and Transformers sets that instead of passing memsave= on."
            raise ConfigError(reason, "Remove that key from its config.json.")
    loaded = stock(cls, *args, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded  # output_loading_info=True
    if config is not None:
        from hf_memsave.patching.patch import patch

        logger.debug("%s", patch(model, config))
    elif memsave is False and (patching := sys.modules.get("hf_memsave.patching.patch")):
        patching.unpatch(model)  # a base model may be patched
    return loaded


def teach_peft(tuners: Any) -> None:
    """Have adapters patched as PEFT adds them to a patched model, or by a config that asks for it."""
    wrap(tuners.BaseTuner, "inject_adapter", _add_adapter)


def _add_adapter(
    stock: Callable[..., Any], self: Any, /, model: Any, adapter_name: str, *args: Any, **kwargs: Any
) -> Any:
    is_asked = getattr(self.peft_config[adapter_name], "memsave", None) not in (None, False)
    if not is_asked and "hf_memsave.patching.swap" not in sys.modules:  # nothing is patched
        return stock(self, model, adapter_name, *args, **kwargs)
    from hf_memsave.integrations.adapters import inject_adapter

    return inject_adapter(stock, self, model, adapter_name, *args, **kwargs)


def teach_trainers(module: Any) -> None:
    """Teach ``Trainer`` and its subclasses the ``memsave`` argument, and the place of its callback."""
    wrap(module.CallbackHandler, "add_callback", _place_callback)
    wrap(module.Trainer, "__init__", partial(_make_trainer, False))
    classes = module.Trainer.__subclasses__()
    for cls in classes:  # which grows
        _teach_subclass(cls)
        classes += cls.__subclasses__()
    teach_arguments(sys.modules["transformers.training_args"])
    wrap(module.Trainer, "__init_subclass__", partial(_make_subclass, module.Trainer))


def _teach_subclass(cls: type) -> None:
    if taken := _parameters_of(cls):
        wrap(cls, "__init__", partial(_make_trainer, any(p.kind is p.VAR_KEYWORD for p in taken)))


def _parameters_of(cls: type) -> list[Any]:
    """Return the parameters of an ``__init__`` that ``cls`` defines itself; none if ``memsave`` is one."""
    from inspect import signature  # which importing hf_memsave need not wait for

    own = vars(cls).get("__init__")
    taken = signature(own).parameters if isinstance(own, FunctionType) else {}
    return [] if "memsave" in taken else [*taken.values()]


def _make_subclass(trainer: type, stock: Callable[..., None] | None, cls: type, /, **kwargs: Any) -> None:
    if stock is None:
        super(trainer, cls).__init_subclass__(**kwargs)  # type: ignore[arg-type]
    else:
        stock(cls, **kwargs)
    _teach_subclass(cls)
    teach_arguments(sys.modules["transformers.training_args"])  # the class of the trainer's arguments is there by now


def _make_trainer(
    hands_on: bool, stock: Callable[..., None], self: Any, /, *args: Any, memsave: MemSaveLike | None = None,
    **kwargs: Any,
) -> None:  # fmt: skip
    from hf_memsave.config.config import MemSaveConfig

    config = MemSaveConfig.resolve(memsave, may_plan=True)  # a wrong name must not cost a download
    handed_on = {"memsave": memsave} if hands_on and memsave is not None else {}
    stock(self, *args, **handed_on, **kwargs)
    if config is None and "hf_memsave.patching.swap" not in sys.modules:  # nothing is patched
        return
    from hf_memsave.integrations.trainer import MemSaveCallback, without_callback

    if config is None:
        without_callback(self, memsave)
        return
    given = kwargs.get("callbacks") or ()
    there = [c for c in self.callback_handler.callbacks if type(c) is MemSaveCallback and c not in given]
    if not handed_on or not there:  # else a subclass passed it on, perhaps as another config
        MemSaveCallback(config).add_to(self)


def _place_callback(stock: Callable[..., None], self: Any, /, callback: Any) -> None:
    """Add a callback, and have ``MemSaveCallback`` come before the reporters, which then get its figures."""
    stock(self, callback)
    if (ours := sys.modules.get("hf_memsave.integrations.trainer")) is not None:
        # A new list, as code may be iterating over the old one.
        self.callbacks = sorted(self.callbacks, key=lambda there: not isinstance(there, ours.MemSaveCallback))
