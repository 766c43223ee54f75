"""Count what stays alive of many training steps, with faults injected among them, in four modes of three models.

    nice -n 19 python scripts/bench/leaks.py [--steps 1000] [--faults 300] [--modes few-bit] [--out FILE]

Each model of each mode trains --steps steps; then --faults more steps each go wrong in a random place: an error in the
forward of some module, before the loss, at a random op of backward, or an interrupt. After each 100 steps (50 faults),
the live bytes of every tensor that Python can see are counted. Then it trains 10 steps with the cycle collector off,
and what a collection frees after them is counted: a reference cycle that holds a tensor. In few-bit the linears after
activations are frozen and T5's MLP is not gated: else it keeps no bits, as it does not in LLaMA. Rows of other modes
than --modes are taken from FILE.
"""

import argparse
import datetime
import gc
import platform
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_memsave import WTACRS, MemSaveConfig, measure_kept, patch
from hf_memsave.tape.content import Content

RESULTS = Path(__file__).resolve().parents[1] / "results"
VOCAB, BATCH, LENGTH, WIDTH = 64, 2, 24, 32
MODES = {
    "exact": MemSaveConfig(),
    "int8": MemSaveConfig(storage="int8"),
    "WTA": MemSaveConfig(linear=WTACRS(budget=0.3, minimum=4)),
    "few-bit": MemSaveConfig(activation="few_bit"),
}
#: Models that have no other MLP.
GATED = ("LLaMA",)
#: What stands after the activations, by model.
DOWN = {"BERT": r"layer\.\d+\.output\.dense\.", "LLaMA": r"\.down_proj\.", "T5": r"\.wo\."}


class Fault(Exception):
    """What is injected."""


class Found(NamedTuple):
    """Of one model in one mode.

    Attributes:
        steps: Live bytes, after each 100 steps.
        faults: The same, after each 50 faults.
        struck: How many faults struck.
        cycles: Bytes that only a collection frees.
        nodes: Nodes of the tape that are alive at the end.
    """

    steps: list[int]
    faults: list[int]
    struck: int
    cycles: int
    nodes: int

    def is_clean(self) -> bool:
        """Whether nothing stays alive."""
        return len({*self.steps, *self.faults}) == 1 and not self.cycles and not self.nodes


def build(name: str, is_few_bit: bool = False) -> nn.Module:
    """A model of two blocks, with dropout; if few bits of activations are to be kept, one whose MLP keeps no more."""
    model = _build(name, is_gated=not is_few_bit)
    if is_few_bit:
        freeze_down(model, name)
    return model.train()


def _build(name: str, is_gated: bool) -> nn.Module:
    torch.manual_seed(0)
    common = dict(vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    if name == "BERT":
        return BertForSequenceClassification(BertConfig(**common))
    if name == "LLaMA":
        return LlamaForCausalLM(LlamaConfig(**common, num_key_value_heads=2, attention_dropout=0.1))
    config = T5Config(
        vocab_size=VOCAB, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
        feed_forward_proj="gated-gelu" if is_gated else "gelu",
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


MODELS = ("BERT", "LLaMA", "T5")


def freeze_down(model: nn.Module, name: str) -> None:
    """Leave the linears after activations as they are drawn."""
    down = [parameter for path, parameter in model.named_parameters() if re.search(DOWN[name], path)]
    assert len(down) >= 2, "a model has two blocks"
    for parameter in down:
        parameter.requires_grad_(False)


class AtOp(TorchDispatchMode):
    """Raises at one op, counted from 0; never for None."""

    def __init__(self, at: int | None, error: type[BaseException]) -> None:
        super().__init__()
        self.at, self.error, self.count = at, error, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and raise."""
        if self.count == self.at:
            self.count += 1
            raise self.error("injected")
        self.count += 1
        return func(*args, **(kwargs or {}))


class Training:
    """A patched model, its batch and its optimizer."""

    def __init__(self, name: str, config: MemSaveConfig) -> None:
        is_few_bit = config.activation == "few_bit"
        self.model = build(name, is_few_bit)
        ids = torch.randint(1, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        mask[1, LENGTH // 2 :] = 0
        labels = torch.tensor([0, 1]) if name == "BERT" else ids.masked_fill(mask == 0, -100)
        self.batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        patch(self.model, MODES["exact"])
        exact = measure_kept(self.model, self.batch).total
        patch(self.model, config, replace=True)
        if is_few_bit and name not in GATED:
            assert measure_kept(self.model, self.batch).total < exact, "no bits are kept"
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], 1e-4)
        self.modules = [module for module in self.model.modules() if not list(module.children())]
        self.ops = 1

    def step(self, is_counted: bool = False) -> None:
        """One that nothing goes wrong in."""
        loss = self.model(**self.batch).loss
        if is_counted:
            with AtOp(None, Fault) as counter:
                loss.backward()
            self.ops = counter.count
        else:
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def faulty_step(self, chance: random.Random) -> bool:
        """One that goes wrong somewhere; whether the fault struck (a module may not be called)."""
        error = chance.choice((Fault, KeyboardInterrupt, torch.OutOfMemoryError))
        place = chance.choice(("forward", "loss", "backward", "backward"))

        def strike(*_: Any) -> None:
            raise error("injected")

        hook = chance.choice(self.modules).register_forward_pre_hook(strike) if place == "forward" else None
        try:
            loss = self.model(**self.batch).loss
            if place == "loss":
                strike()
            with AtOp(chance.randrange(self.ops) if place == "backward" else None, error):
                loss.backward()
        except (Fault, KeyboardInterrupt, torch.OutOfMemoryError) as found:
            if str(found) != "injected":
                raise
            return True
        finally:
            if hook is not None:
                hook.remove()
            self.optimizer.zero_grad(set_to_none=True)
        return False


def storages() -> dict[int, int]:
    """Bytes of every storage that Python can see, by its address."""
    found = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            storage = thing.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def live_bytes() -> int:
    """Of all of them; the next backward of a thread frees what an error left in PyTorch's engine."""
    torch.ones((), requires_grad=True).square().backward()
    gc.collect()
    return sum(storages().values())


@contextmanager
def no_collection() -> Iterator[None]:
    """The cycle collector is off."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def in_cycles(step: Callable[[], None], steps: int = 10) -> int:
    """Bytes that steps leave to the cycle collector."""
    step()
    with no_collection():
        for _ in range(steps):
            step()
        before = sum(storages().values())
        gc.collect()
        return before - sum(storages().values())


def measure(name: str, config: MemSaveConfig, steps: int, faults: int) -> Found:
    """Train, well and badly."""
    training, chance = Training(name, config), random.Random(0)
    for number in range(3):
        training.step(is_counted=number == 2)
    of_steps, of_faults, struck = [], [], 0
    for number in range(1, steps + 1):
        training.step()
        if number % 100 == 0 or number == steps:
            of_steps.append(live_bytes())
    while struck < faults:
        struck += training.faulty_step(chance)
        if struck % 50 == 0 or struck == faults:
            training.step()
            of_faults.append(live_bytes())
    cycles = in_cycles(training.step)
    remade = sum(type(thing) is Content and thing.make is not None for thing in gc.get_objects())
    return Found(of_steps, of_faults, struck, cycles, remade)


def row(name: str, mode: str, found: Found) -> str:
    """A line of the table."""

    def span(values: list[int]) -> str:
        return f"{values[0]:,}" if len(set(values)) == 1 else f"{min(values):,} to {max(values):,}"

    return (
        f"{label_of(name, mode)} {span(found.steps)} | {found.struck} | {span(found.faults)} | {found.cycles} | "
        f"{found.nodes} | {'yes' if found.is_clean() else 'NO'} |"
    )


def main() -> None:
    """Measure all, write the table, and exit with 1 if anything stays alive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--out", type=Path, default=RESULTS / "leaks.md", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, is_clean = time.monotonic(), True
    before = options.out.read_text(encoding="utf-8").splitlines() if options.out.is_file() else []
    lines = {label: line for label in LABELS for line in before if line.startswith(label)}
    for name in MODELS:
        for mode in options.modes:
            found = measure(name, MODES[mode], options.steps, options.faults)
            lines[label_of(name, mode)] = row(name, mode, found)
            is_clean &= found.is_clean()
            print(row(name, mode, found), f"{time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    write(options, [lines[label] for label in LABELS if label in lines], [x for x in before if x.startswith("- ")])
    sys.exit(not is_clean)


def label_of(name: str, mode: str) -> str:
    """How a row begins."""
    return f"| {name} | {mode} |"


LABELS = [label_of(name, mode) for name in MODELS for mode in MODES]


def write(options: argparse.Namespace, lines: list[str], before: list[str]) -> None:
    """The table, and where its rows are from: after ``before`` if some modes alone were measured."""
    chosen = "" if options.modes == list(MODES) else f" --modes {' '.join(options.modes)}"
    command = f"python scripts/bench/leaks.py --steps {options.steps} --faults {options.faults}{chosen}"
    source = [
        f"- command: `{command}`",
        f"- machine: {platform.machine()}, CPU, one thread",
        f"- versions: torch {torch.__version__}, transformers {transformers.__version__}",
        f"- date: {datetime.date.today().isoformat()}",
    ]
    tail = [*before, f"- rows of {' and '.join(options.modes)}, measured again:", *source] if chosen else source
    head = [
        f"# What stays alive after {options.steps} steps and {options.faults} faults", "",
        f"Two blocks of width {WIDTH}, batch {BATCH} x {LENGTH}, padded, dropout, AdamW, fp32, CPU. Bytes of every "
        "live tensor, after each 100 steps and each 50 faults: one number where all counts agree. Faults are errors, "
        "interrupts and running out of memory: in a module's forward, before the loss, or at an op of backward. "
        "Cycles: bytes that 10 steps with the cycle collector off leave to it. Nodes: of the tape, alive at the end. "
        "In few-bit the linears after activations are frozen and T5's MLP is not gated, or it would keep no bits; in "
        "LLaMA it makes bits and lets go of them, since a gated MLP's product wants the activation's output.",
        "", "| model | mode | bytes over steps | faults | bytes over faults | cycles | nodes | flat |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join([*head, *lines, "", *tail, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
