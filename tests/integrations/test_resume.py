"""Interrupted and resumed: from its last checkpoint, by stock or by us, a run ends as one that never stopped."""

import contextlib
import functools
import io

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback

from hf_memsave import MemSaveCallback
from hf_memsave.patching.swap import is_patched
from support.helpers import only_on_cpu
from support.rows import Rows, arguments, logged
from support.steps import assert_same
from support.zoo import Size, build

STEPS, SAVE_STEPS, SWITCHED_AT = 10, 2, 4
FAMILIES = ("bert", "llama with LoRA")
ENDS = ("stock", "memsave")


class Interrupt(TrainerCallback):
    """Ends a run in the step of a number (the first is 1): in a pass of the model, or before the optimizer's step."""

    def __init__(self, model, step, place):
        self.layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.weight.requires_grad]
        self.step, self.place = step, place

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            layer = self.layers[len(self.layers) // 2]
            if self.place == "forward":
                layer.register_forward_hook(self.stop)
            elif self.place == "backward":
                layer.register_forward_hook(lambda module, args, output: (output.register_hook(self.stop), None)[1])

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if (state.global_step + 1, self.place) == (self.step, "optimizer"):
            self.stop()

    def stop(self, *_):
        raise KeyboardInterrupt


def run(folder, family, end, checkpoint=None, interrupt=None):
    """All that a run leaves."""
    name, *lora = family.split(" with ")
    model = build(name, Size(hidden=16, heads=2))
    if lora:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", lora_dropout=0.2))
    saves = dict(save_strategy="steps", save_steps=SAVE_STEPS)
    args = arguments(folder, max_steps=STEPS, per_device_train_batch_size=3, bf16=family != "bert", **saves)
    callbacks = [MemSaveCallback()] * (end == "memsave")
    callbacks += [] if interrupt is None else [Interrupt(model, *interrupt)]
    trainer = Trainer(model, args, train_dataset=Rows(family), callbacks=callbacks)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train(resume_from_checkpoint=checkpoint)
    assert any(map(is_patched, model.modules())) == (end == "memsave")
    state = trainer.optimizer.state_dict()["state"]
    losses = logged(trainer, "loss", "grad_norm")
    found = {f"optimizer.{n}.{key}": value for n, entry in state.items() for key, value in entry.items()}
    found |= {name: p.detach() for name, p in model.named_parameters()}
    return found | {"logged": torch.tensor(losses, dtype=torch.float64), "generator": torch.get_rng_state()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, device):
    """What an uninterrupted run of a family leaves, and its folder."""
    only_on_cpu(device)

    @functools.cache
    def whole(family, end):
        folder = tmp_path_factory.mktemp("run")
        return run(folder, family, end), folder

    return whole


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "step", "place"),
    [("bert", 5, "forward"), ("llama with LoRA", 8, "backward"), ("bert", 4, "optimizer")],
)  # fmt: skip
def test_an_interrupted_and_resumed_run_ends_as_an_uninterrupted_one(family, step, place, whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, family, "memsave", interrupt=(step, place))
    last = (step - 1) // SAVE_STEPS * SAVE_STEPS
    assert sorted(folder.name for folder in tmp_path.glob("checkpoint-*"))[-1] == f"checkpoint-{last}"
    resumed = run(tmp_path, family, "memsave", str(tmp_path / f"checkpoint-{last}"))
    assert_same(resumed, whole(family, "memsave")[0])


@pytest.mark.parametrize(("family", "end"), zip(FAMILIES, ENDS, strict=True))
def test_stock_takes_up_our_checkpoint_and_we_stocks(family, end, whole, tmp_path):
    (start,) = set(ENDS) - {end}
    _, folder = whole(family, start)
    switched = run(tmp_path, family, end, str(folder / f"checkpoint-{SWITCHED_AT}"))
    assert_same(switched, whole(family, "stock")[0])
