"""Interrupt training steps by real SIGINTs at random moments; the next step must be as if nothing had happened.

    python scripts/interrupts.py --count 5000

The caller must see KeyboardInterrupt, and the next step must have stock's gradients to the bit, the bytes of a step
that was never interrupted within 1%, and leave no hook and no function mode on the thread. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections import Counter
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memsave import measure_kept, patch
from hf_memsave.tape import private

SETTINGS: dict[str, Any] = {"exact": {}, "block": {"checkpoint": "block"}, "offload": {"offload": True}}


class Trained:
    """A small LLaMA of one setting, the gradients of stock's step, and the bytes that its own step keeps."""

    def __init__(self, setting: str) -> None:
        self.batch = dict.fromkeys(("input_ids", "labels"), torch.arange(48).view(2, 24))
        self.stock = self.gradients(self.model())
        self.ours = self.model()
        patch(self.ours, **SETTINGS[setting])
        times = []
        for _ in range(5):
            start = time.perf_counter()
            self.gradients(self.ours)
            times.append(time.perf_counter() - start)
        self.seconds = min(times)
        self.nbytes = measure_kept(self.ours, self.batch).total

    @staticmethod
    def model() -> LlamaForCausalLM:
        """A stock model, the same each time."""
        torch.manual_seed(0)
        sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
        return LlamaForCausalLM(LlamaConfig(use_cache=False, attention_dropout=0.1, **sizes)).train()

    def gradients(self, model: LlamaForCausalLM) -> list[torch.Tensor | None]:
        """Those of one step."""
        model.zero_grad()
        torch.manual_seed(1)
        model(**self.batch).loss.backward()
        return [p.grad for p in model.parameters()]

    def interrupted(self, after: float) -> str:
        """What is wrong with a step that is interrupted ``after`` so many seconds, and with the next one."""
        found = "not interrupted"
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, after)
                self.gradients(self.ours)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            found = ""
        except BaseException as error:
            found = f"the caller sees {type(error).__name__}"
        if found == "not interrupted":
            return found
        torch.set_grad_enabled(True)  # which PyTorch's own contexts may leave off
        torch.set_autocast_cache_enabled(True)
        try:
            after_it = self.gradients(self.ours)
        except Exception as error:
            return f"{found} the next step raises {type(error).__name__}: {error}"[:200]
        if not all(map(torch.equal, after_it, self.stock)):
            found += " the next step has other gradients"
        if abs(kept := measure_kept(self.ours, self.batch).total - self.nbytes) > 0.01 * self.nbytes:
            found += f" the next step keeps {kept:+,} bytes"
        if private.innermost_hooks() is not None or private.count_modes():
            found += " hooks or modes are left"
        return found.strip()


def interrupt(setting: str, count: int, seed: int = 0) -> Counter[str]:
    """Interrupt so many steps; how often what was found wrong."""
    draw, trained, found = random.Random(seed), Trained(setting), Counter[str]()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        while found.total() - found["not interrupted"] < count:
            found[trained.interrupted(max(1e-6, draw.uniform(0, 1.1 * trained.seconds)))] += 1
    finally:
        signal.signal(signal.SIGALRM, before)
    return found


def main() -> int:
    """Interrupt steps of each setting, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5000, help="interrupts in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    wrong = 0
    for setting in SETTINGS:
        found = interrupt(setting, -(-args.count // len(SETTINGS)), args.seed)
        missed, right = found.pop("not interrupted", 0), found.pop("", 0)
        wrong += found.total()
        print(f"{setting}: {right} interrupts as if nothing had happened, {missed} came too late", flush=True)
        for what, n in found.most_common():
            print(f"  {n}: {what}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
