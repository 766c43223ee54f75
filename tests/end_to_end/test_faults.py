"""Over 500 steps the live bytes stay flat; after any of 100 injected faults a model trains on as stock does."""

import contextlib
import copy
import dataclasses
import gc
import random
from typing import NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from hf_memsave import WTACRS, MemSaveConfig, patch
from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.count.kept import _ByModule
from support.helpers import MATRIX, autocasting, live_bytes, nodes, on_cpu_alone
from support.steps import assert_same, gradients, patched_classes
from support.zoo import VOCAB, Size, batch_for, build

on_cpu = on_cpu_alone()
STEPS, EVERY = 500, 100
ROUNDS = 4  # of faults of each kind, for each model: 3 x 9 x 4 = 108
SIZE = Size(hidden=16, heads=2, layers=2, batch=2, seq=8)
MODELS = ("bert", "llama with LoRA under autocast", "gpt2 with checkpointing")

pytestmark = pytest.mark.long


class Fault(Exception):
    """Stands for any error of the user's."""


#: Where a fault is raised, and what.
KINDS = [(place, Fault) for place in ("forward", "loss", "backward")]
KINDS += [(place, torch.OutOfMemoryError) for place in ("forward", "backward", "op")]
KINDS += [("forward", KeyboardInterrupt), ("backward", KeyboardInterrupt), ("nan", None)]


class Injected(NamedTuple):
    """An error, where it strikes, in which module, and at which of its backward's ops (as a part of 1)."""

    place: str
    error: type | None
    module: str
    part: float

    def strike(self, *_):
        raise self.error("injected")


class OutOfOps(TorchDispatchMode):
    """Counts the ops that run, and lets the fault strike at one of them."""

    def __init__(self, at=None, strike=None):
        super().__init__()
        self.at, self.strike, self.count = at, strike, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.at:
            self.strike()
        return func(*args, **(kwargs or {}))


class Run:
    """A model, its optimizer and its scaler, stock or patched; both of a pair meet the same faults."""

    def __init__(self, name, model, config):
        self.model, self.batch = model, batch_for(model, SIZE, padded=True)
        self.labels = self.batch.pop("labels")
        self.autocast = torch.bfloat16 if "autocast" in name else None
        if config is not None:
            patch(model, config)
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
        self.scaler = torch.amp.GradScaler(device="cpu", init_scale=8.0, growth_interval=10**6)
        self.ops = 1  # of the last backward

    def loss(self, strike=lambda: None):
        with autocasting(torch.device("cpu"), self.autocast):
            logits = self.model(**self.batch).logits
            strike()
            if self.labels.dim() == 1:
                return cross_entropy(logits, self.labels)
            return cross_entropy(logits.float().view(-1, VOCAB), self.labels.view(-1))

    def step(self, counted=False):
        """One that nothing goes wrong in."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        with OutOfOps() if counted else contextlib.nullcontext() as counter:
            loss.backward()
        self.ops = counter.count if counted else self.ops
        self.optimizer.step()
        return {"loss": loss.detach().clone(), **gradients(self.model), "generator": torch.get_rng_state()}

    def nan_step(self):
        """As a loop with a scaler does it: gradients that are not finite skip the step."""
        before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        scale = self.scaler.get_scale()
        self.scaler.scale(self.loss() * float("nan")).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        assert self.scaler.get_scale() == scale / 2
        assert_same(dict(self.model.named_parameters()), before)

    def faulty_step(self, fault):
        """Goes wrong where ``fault`` says, and is caught outside, as by a loop that goes on."""
        self.optimizer.zero_grad(set_to_none=True)
        if fault.place == "nan":
            return self.nan_step()
        module = self.model.get_submodule(fault.module)
        with contextlib.ExitStack() as stack:
            if fault.place == "forward":
                stack.callback(module.register_forward_pre_hook(fault.strike).remove)
            elif fault.place == "backward":
                stack.callback(module.register_forward_hook(lambda m, i, o: strike_at(o, fault.strike)).remove)
            try:
                loss = self.loss(fault.strike if fault.place == "loss" else lambda: None)
                with OutOfOps(1 + int(fault.part * self.ops) if fault.place == "op" else None, fault.strike):
                    loss.backward()
            except fault.error as error:
                assert str(error) == "injected"
                return None
        raise AssertionError(f"{fault} never struck")


def first_tensor(output):
    while isinstance(output, (tuple, list)):
        output = output[0] if output else None
    output = getattr(output, "last_hidden_state", getattr(output, "logits", output))
    return output if isinstance(output, torch.Tensor) and output.requires_grad else None


def strike_at(output, strike):
    """A hook that strikes when backward comes to ``output``; not in the forward that a checkpoint runs again."""
    if torch._C._current_graph_task_id() == -1:
        first_tensor(output).register_hook(strike)


def pair(name, config=True, size=SIZE):
    torch.manual_seed(0)
    stock = build(name.partition(" ")[0], size)
    if "LoRA" in name:
        stock = get_peft_model(stock, LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1))
    if "checkpointing" in name:
        enable_checkpointing(stock)
    runs = Run(name, copy.deepcopy(stock), config), Run(name, stock, None)
    assert patched_classes(runs[0].model) and not patched_classes(runs[1].model)
    return runs


def reached(run):
    """Paths of the modules that forward calls, and of those whose output backward comes to."""
    names, called, passed = {m: n for n, m in run.model.named_modules()}, set(), set()

    def note(module, args, output):
        called.add(names[module])
        if (tensor := first_tensor(output)) is not None:
            tensor.register_hook(lambda grad: passed.add(names[module]))

    handles = [module.register_forward_hook(note) for module in names]
    run.loss().backward()
    for handle in handles:
        handle.remove()
    return sorted(called), sorted(passed)


def faults(seed, called, passed, rounds):
    """Every kind in each round, in random order, each in a random module."""
    chance = random.Random(seed)
    kinds = list(KINDS) * rounds
    chance.shuffle(kinds)
    for place, error in kinds:
        yield Injected(place, error, chance.choice(passed if place == "backward" else called), chance.random())


def assert_nothing_is_left():
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None, "saved-tensor hooks are left"
    assert not _get_current_dispatch_mode_stack(), "a dispatch mode is left"
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    assert not (left := nodes()), f"{len(left)} nodes are alive"


APPROXIMATE = ({"storage": "int8"}, {"activation": "few_bit"}, {"linear": WTACRS(minimum=4)})
CASES = [(name, {}, ROUNDS) for name in MODELS] + [(name, f, 2) for f in APPROXIMATE for name in ("bert", "llama")]


@pytest.mark.parametrize(("name", "fields", "rounds"), CASES)
def test_after_a_fault_a_model_trains_on_as_stock_does_and_nothing_is_left(name, fields, rounds):
    ours, stock = pair(name, MemSaveConfig(**fields))
    called, passed = reached(stock)
    assert len(called) >= len(passed) > 10
    for run in (ours, stock):
        torch.manual_seed(0)
        run.step(counted=True)
    assert ours.ops != stock.ops  # ours computes again in backward
    alive = []
    for number, fault in enumerate(faults(len(name), called, passed, rounds)):
        after = []
        for run in (ours, stock):
            torch.manual_seed(number)
            run.faulty_step(fault)
            assert_nothing_is_left()
            after.append(run.step())  # with the generator as the fault left it
        assert torch.isfinite(after[1]["loss"])
        try:
            assert fields or assert_same(*after) is None
        except AssertionError as error:
            raise AssertionError(f"{number}. {fault}: {error}") from None
        del after
        alive.append(live_bytes())
    assert len(alive) == rounds * len(KINDS)
    assert len(set(alive[len(KINDS) :])) == 1, alive  # once the loss scaler has made its two numbers
    assert fields or assert_same(dict(ours.model.named_parameters()), dict(stock.model.named_parameters())) is None
    assert_nothing_is_left()


@pytest.mark.parametrize("name", [pytest.param(MODELS[0], marks=MATRIX), MODELS[1]])
def test_live_bytes_are_flat_over_500_steps(name):
    """What a step makes and leaves alive, in autograd, C++ or a cache, is nothing."""
    run = pair(name, size=dataclasses.replace(SIZE, layers=1))[0]
    bytes_, objects, start = [], [], run.step()["loss"]
    for _ in range(STEPS // EVERY):
        for _ in range(EVERY - 1):
            loss = run.step()["loss"]
        with _ByModule(torch.nn.Module()) as watch:
            run.step()
            run.optimizer.zero_grad(set_to_none=True)
            gc.collect()
            assert sum(record.nbytes for record in watch.alive()) == 0
        bytes_.append(live_bytes())
        objects.append(len(gc.get_objects()))
        assert not nodes()
    assert len(set(bytes_)) == 1, bytes_
    assert max(objects) - min(objects) < EVERY, objects  # one a step would be 500
    assert loss < start
