"""Over 1,000 steps the live bytes stay flat; after any of 200 injected faults a model trains on as stock does."""

import contextlib
import copy
import dataclasses
import gc
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from hf_memsave import WTACRS, MemSaveConfig, patch
from hf_memsave.tape.meter import _ByModule, live_tensors, storages
from support.families import VOCAB, Size, batch_for, build
from support.helpers import EARLIER, MATRIX, autocasting, nodes, only_on_cpu
from support.steps import assert_same, gradients, patched_classes

STEPS, EVERY = 1000, 100
ROUNDS = 8  # of faults of each kind, for each model: 3 x 9 x 8 = 216
SIZE = Size(hidden=16, heads=2, layers=2, batch=2, seq=8)
MODELS = ("bert", "llama with LoRA under autocast", "gpt2 with checkpointing")

pytestmark = pytest.mark.long


class Fault(Exception):
    """Stands for any error of the user's."""


#: Kind -> where it is raised, and what.
KINDS = {
    "error in forward": ("forward", Fault),
    "error in the loss": ("loss", Fault),
    "error in backward": ("backward", Fault),
    "out of memory in forward": ("forward", torch.OutOfMemoryError),
    "out of memory in backward": ("backward", torch.OutOfMemoryError),
    "out of memory in an op of backward": ("op", torch.OutOfMemoryError),
    "interrupt in forward": ("forward", KeyboardInterrupt),
    "interrupt in backward": ("backward", KeyboardInterrupt),
    "NaN loss": ("nan", None),
}


class Injected(NamedTuple):
    """A fault of a kind, in which module, and at which of its backward's ops (as a part of 1)."""

    kind: str
    module: str
    part: float

    @property
    def place(self):
        return KINDS[self.kind][0]

    def strike(self, *_):
        raise KINDS[self.kind][1]("injected")


class OutOfOps(TorchDispatchMode):
    """Counts the ops that run, and lets the fault strike at one of them."""

    def __init__(self, at=None, strike: Callable[[], None] | None = None):
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
        self.autocast = torch.bfloat16 if "autocast" in name else None
        if config is not None:
            patch(model, config)
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
        self.scaler = torch.amp.GradScaler(device="cpu", init_scale=8.0, growth_interval=10**6)
        self.ops = 1  # of the last backward

    def loss(self, strike=lambda: None):
        labels = self.batch["labels"]
        with autocasting(torch.device("cpu"), self.autocast):
            logits = self.model(**{k: v for k, v in self.batch.items() if k != "labels"}).logits
            strike()
            if labels.dim() == 1:
                return cross_entropy(logits, labels)
            return cross_entropy(logits.float().view(-1, VOCAB), labels.view(-1))

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
        self.optimizer.zero_grad(set_to_none=True)
        before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        scale = self.scaler.get_scale()
        self.scaler.scale(self.loss() * float("nan")).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        assert self.scaler.get_scale() == scale / 2
        assert_same(dict(self.model.named_parameters()), before)

    def faulty_step(self, fault):
        """Goes wrong where ``fault`` says, and is caught outside, as by a loop that goes on."""
        if fault.place == "nan":
            return self.nan_step()
        self.optimizer.zero_grad(set_to_none=True)
        module = self.model.get_submodule(fault.module)
        with contextlib.ExitStack() as stack:
            if fault.place == "forward":
                stack.callback(module.register_forward_pre_hook(fault.strike).remove)
            elif fault.place == "backward":
                stack.callback(module.register_forward_hook(lambda m, i, o: strike_at(o, fault.strike)).remove)
            try:
                loss = self.loss(fault.strike if fault.place == "loss" else lambda: None)
                at = 1 + int(fault.part * self.ops) if fault.place == "op" else None
                with OutOfOps(at, fault.strike):
                    loss.backward()
            except KINDS[fault.kind][1] as error:
                assert str(error) == "injected"
                return
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


def model_of(name, size):
    family, *with_ = name.split(" with ")
    model = build(family, size)
    if with_ and with_[0].startswith("LoRA"):
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.1))
    if with_ == ["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def pair(name, config=True, size=SIZE):
    torch.manual_seed(0)
    stock = model_of(name, size)
    runs = [Run(name, copy.deepcopy(stock), config), Run(name, stock, None)]
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


def faults(seed, called, passed):
    """Every kind ``ROUNDS`` times, in random order, each in a random module."""
    chance = random.Random(seed)
    kinds = list(KINDS) * ROUNDS
    chance.shuffle(kinds)
    for kind in kinds:
        modules = passed if KINDS[kind][0] == "backward" else called
        yield Injected(kind, chance.choice(modules), chance.random())


@pytest.fixture(autouse=True)
def _others():
    """What tests of other files hold, in a cache or a traceback, is not for these to judge."""
    EARLIER.update(nodes())


def assert_nothing_is_left():
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None, "saved-tensor hooks are left"
    assert not _get_current_dispatch_mode_stack(), "a dispatch mode is left"
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    assert not (left := nodes()), f"{len(left)} nodes are alive"


@pytest.mark.parametrize("name", MODELS)
def test_after_a_fault_a_model_trains_on_as_stock_does(name, device):
    only_on_cpu(device)
    ours, stock = pair(name)
    called, passed = reached(stock)
    assert len(called) >= len(passed) > 10
    for run in (ours, stock):
        torch.manual_seed(0)
        run.step(counted=True)
    assert ours.ops != stock.ops  # ours computes again in backward
    alive = []
    for number, fault in enumerate(faults(MODELS.index(name), called, passed)):
        after = []
        for run in (ours, stock):
            torch.manual_seed(number)
            run.faulty_step(fault)
            assert_nothing_is_left()
            after.append(run.step())  # with the generator as the fault left it
        assert torch.isfinite(after[1]["loss"])
        try:
            assert_same(*after)
        except AssertionError as error:
            raise AssertionError(f"{number}. {fault}: {error}") from None
        del after
        alive.append(live_bytes())
    assert len(set(alive[len(KINDS) :])) == 1, alive  # once the loss scaler has made its two numbers
    assert_same(dict(ours.model.named_parameters()), dict(stock.model.named_parameters()))
    assert_nothing_is_left()


def test_faults_are_of_every_kind_and_200_in_all():
    found = [fault for seed in range(len(MODELS)) for fault in faults(seed, ["a", "b"], ["b", "c"])]
    assert len(found) >= 200
    assert {fault.kind for fault in found} == KINDS.keys()
    assert len({(fault.kind, fault.module) for fault in found}) > len(KINDS)


def test_a_node_that_is_held_is_seen():
    run = pair("bert")[0]
    loss = run.loss()
    assert nodes()
    with pytest.raises(AssertionError, match="nodes are alive"):
        assert_nothing_is_left()
    del loss
    assert not nodes()


def live_bytes():
    """Of every storage that Python can see, once."""
    gc.collect()
    return sum({s._cdata: s.nbytes() for s in storages(live_tensors())}.values())


def left_by(run):
    """Bytes that a step makes and leaves alive: in autograd, C++ or a cache."""
    with _ByModule(torch.nn.Module()) as watch:
        run.step()
        run.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        return sum(record.nbytes for record in watch.alive())


@pytest.mark.parametrize("name", [pytest.param(MODELS[0], marks=MATRIX), MODELS[1]])
def test_live_bytes_are_flat_over_1000_steps(name, device):
    only_on_cpu(device)
    run = pair(name, size=dataclasses.replace(SIZE, layers=1))[0]
    bytes_, objects, start = [], [], run.step()["loss"]
    for _ in range(STEPS // EVERY):
        for _ in range(EVERY - 1):
            loss = run.step()["loss"]
        assert left_by(run) == 0
        bytes_.append(live_bytes())
        objects.append(len(gc.get_objects()))
        assert not nodes()
    assert len(set(bytes_)) == 1, bytes_
    assert max(objects) - min(objects) < EVERY, objects  # one a step would be 1,000
    assert loss < start


@pytest.mark.parametrize("fields", [{"storage": "int8"}, {"activation": "few_bit"}, {"linear": WTACRS(minimum=4)}])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_live_bytes_are_flat_over_faults_where_gradients_are_approximate(name, fields, device):
    only_on_cpu(device)
    run = pair(name, MemSaveConfig(**fields))[0]
    called, passed = reached(run)
    alive = []
    for number, fault in enumerate(faults(0, called, passed)):
        run.step(counted=True)
        run.faulty_step(fault)
        assert_nothing_is_left()
        if number % len(KINDS) == len(KINDS) - 1:
            run.step()
            alive.append(live_bytes())
    assert len(set(alive[1:])) == 1, alive
