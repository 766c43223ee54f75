"""Killed and resumed: a run that SIGKILL ends and a new process takes up from its last checkpoint ends as if unharmed.

Every run is a process of its own under the real ``Trainer``. They are forked off a server that has imported the
libraries, and has done nothing else: importing them anew for each of so many would take minutes.
"""

import contextlib
import io
import multiprocessing as mp
import os
import random
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hf_memsave import MemSaveCallback
from hf_memsave.patching.swap import is_patched
from support.families import Size, build
from support.helpers import only_on_cpu
from support.rows import Rows
from support.steps import assert_same

STEPS, SAVE_STEPS = 10, 2
AT_ONCE, PATIENCE = 2, 120  # processes, seconds
FAMILIES = ("bert", "llama with LoRA")
PLACES = ("forward", "backward", "optimizer", "step end", "saved")
ENDS = ("stock", "memsave")

pytestmark = pytest.mark.long


class Kill(NamedTuple):
    """Where a run dies: in which of its steps (the first is 1), at what, and in a pass of the model, in which layer."""

    step: int
    place: str
    layer: float = 0.0

    def __str__(self):
        return f"{self.place} of step {self.step}"

    @property
    def last_checkpoint(self):
        done = self.step if self.place == "saved" else self.step - 1
        return done // SAVE_STEPS * SAVE_STEPS


def kills(seed):
    """One at each place, at random steps after the first checkpoint; a checkpoint is saved at even ones only."""
    chance = random.Random(seed)
    steps = {place: chance.randint(SAVE_STEPS + 1, STEPS - 1) for place in PLACES}
    steps["saved"] -= steps["saved"] % SAVE_STEPS
    return [Kill(step, place, chance.random()) for place, step in steps.items()]


KILLS = list(zip(FAMILIES * 3, kills(seed=1), strict=False))
SWITCHED_AT = STEPS // 2 // SAVE_STEPS * SAVE_STEPS


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


class Killer(TrainerCallback):
    """Ends the process by SIGKILL: no handler runs, nothing is flushed."""

    def __init__(self, kill, model):
        self.kill = kill
        layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m.weight.requires_grad]
        self.layer = layers[int(kill.layer * len(layers))]

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 != self.kill.step:
            return
        if self.kill.place == "forward":
            self.layer.register_forward_hook(die)
        elif self.kill.place == "backward":
            self.layer.register_forward_hook(lambda module, args, output: (output.register_hook(die), None)[1])

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self._at("optimizer", state.global_step + 1)

    def on_step_end(self, args, state, control, **kwargs):
        self._at("step end", state.global_step)

    def on_save(self, args, state, control, **kwargs):
        self._at("saved", state.global_step)

    def _at(self, place, step):
        if (step, place) == (self.kill.step, self.kill.place):
            die()


class Watcher(TrainerCallback):
    """Counts the steps of this process, and whether the model was patched in each."""

    def __init__(self):
        self.patched = []

    def on_step_end(self, args, state, control, model, **kwargs):
        self.patched.append(any(map(is_patched, model.modules())))


def model_of(family):
    name, *lora = family.split(" with ")
    model = build(name, Size(hidden=16, heads=2))
    if lora:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", lora_dropout=0.2))
    return model


def train(folder, family, end, checkpoint, kill):
    """In a process of its own: train, from a checkpoint or from the start, and leave what came of it."""
    torch.set_num_threads(1)
    model, watcher = model_of(family), Watcher()
    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=3, learning_rate=1e-2, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="steps", save_steps=SAVE_STEPS, seed=3,
        bf16=family != "bert",
    )  # fmt: skip
    callbacks = [watcher] + [MemSaveCallback()] * (end == "memsave")
    callbacks += [] if kill is None else [Killer(kill, model)]
    trainer = Trainer(model, arguments, train_dataset=Rows(family), callbacks=callbacks)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train(resume_from_checkpoint=checkpoint)
    state = trainer.optimizer.state_dict()["state"]
    losses = [(e["loss"], e["grad_norm"]) for e in trainer.state.log_history if "loss" in e]
    found = {f"optimizer.{n}.{key}": value for n, entry in state.items() for key, value in entry.items()}
    found |= {name: p.detach() for name, p in model.named_parameters()}
    found |= {"logged": torch.tensor(losses, dtype=torch.float64), "generator": torch.get_rng_state()}
    torch.save({"found": found, "patched": watcher.patched}, Path(folder) / "end.pt")


class Lab:
    """Runs processes, at most two at a time, and hands out what they left."""

    def __init__(self, root):
        self.root = root
        self.context = mp.get_context("forkserver")
        # All that this file's imports import, but for ours: of those the server would not know the folder.
        models = [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]
        self.context.set_forkserver_preload(["transformers.trainer", "peft", *models])
        self.pool = ThreadPoolExecutor(AT_ONCE)
        self.wholes = {(f, end): self.submit(self.whole, f, end) for f in FAMILIES for end in ENDS}
        self.killed = {(f, k): self.submit(self.kill_and_resume, f, k) for f, k in KILLS}
        self.switched = {(f, end): self.submit(self.switch, f, end) for f in FAMILIES for end in ENDS}

    def submit(self, *call):
        return self.pool.submit(*call)

    def process(self, *arguments):
        process = self.context.Process(target=train, args=arguments)
        process.start()
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"no end after {PATIENCE} s: {arguments}")
        return process.exitcode

    def folder(self):
        return tempfile.mkdtemp(dir=self.root)

    def whole(self, family, end):
        folder = self.folder()
        assert self.process(folder, family, end, None, None) == 0
        return folder, self.left(folder)

    def kill_and_resume(self, family, kill):
        """The exit code of the killed process, the checkpoint it left, and the end of the run that took over."""
        folder = self.folder()
        code = self.process(folder, family, "memsave", None, kill)
        checkpoint = get_last_checkpoint(folder)
        assert not (Path(folder) / "end.pt").exists()
        assert self.process(folder, family, "memsave", checkpoint, None) == 0
        return code, Path(checkpoint).name, self.left(folder)

    def switch(self, family, end):
        """A run that began as the one kind and ends as the other."""
        (start,) = set(ENDS) - {end}
        begun, _ = self.wholes[family, start].result()
        folder = self.folder()
        checkpoint = str(Path(begun) / f"checkpoint-{SWITCHED_AT}")
        assert self.process(folder, family, end, checkpoint, None) == 0
        return self.left(folder)

    @staticmethod
    def left(folder):
        return torch.load(Path(folder) / "end.pt")


@pytest.fixture(scope="module")
def lab(tmp_path_factory, device):
    only_on_cpu(device)
    if "forkserver" not in mp.get_all_start_methods():
        pytest.skip("there is no SIGKILL and no fork here")
    lab = Lab(tmp_path_factory.mktemp("runs"))
    yield lab
    lab.pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_uninterrupted_runs_are_the_same(family, lab):
    (_, ours), (_, stock) = (lab.wholes[family, end].result() for end in ("memsave", "stock"))
    assert (ours["patched"], stock["patched"]) == ([True] * STEPS, [False] * STEPS)
    assert_same(ours["found"], stock["found"])
    assert len(stock["found"]["logged"].unique(dim=0)) == STEPS
    assert sum(name.startswith("optimizer.") for name in stock["found"]) > 20


@pytest.mark.parametrize(("family", "kill"), KILLS, ids=str)
def test_a_killed_and_resumed_run_ends_as_an_uninterrupted_one(family, kill, lab):
    code, checkpoint, resumed = lab.killed[family, kill].result()
    assert code == -signal.SIGKILL
    assert checkpoint == f"checkpoint-{kill.last_checkpoint}"
    assert resumed["patched"] == [True] * (STEPS - kill.last_checkpoint)
    assert_same(resumed["found"], lab.wholes[family, "memsave"].result()[1]["found"])


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_takes_up_our_checkpoint_and_we_stocks(family, end, lab):
    switched = lab.switched[family, end].result()
    assert switched["patched"] == [end == "memsave"] * (STEPS - SWITCHED_AT)
    assert_same(switched["found"], lab.wholes[family, "stock"].result()[1]["found"])
