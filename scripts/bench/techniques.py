"""Kept memory of each technique alone and of each preset, beside stock and beside ``exact``.

    python scripts/bench/techniques.py [--parts full lora tempo step] [--batch 2] [--quick]

Full: BERT-Base, ViT-B and CLIP-L trained whole, the models of InvAct's table. LoRA: BERT-Base. Tempo: its
optimisations one by one, on BERT-Large with eager attention. Step: peak and time of forward and backward of BERT-Base.
Every layer has its real width; two depths are measured, and what whole models keep follows, since their layers are
alike. Writes techniques.{json,md,png}.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from hf_memsave import MemSaveConfig, PatchError, measure_kept, patch
from hf_memsave.measure.depth import Affine, Depths
from hf_memsave.measure.peak import count_peak
from publish import RESULTS, arguments, write
from techniques_report import markdown, picture
from techniques_settings import SETTINGS, STEP, Model, models


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write the three files."""
    parser = arguments(__doc__, RESULTS)
    parser.add_argument("--parts", nargs="+", choices=(*SETTINGS, "step"), default=[*SETTINGS, "step"])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11, help="alternating steps to time")
    parser.add_argument("--quick", action="store_true", help="narrow layers and few tokens: for tests")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    known = models(options.quick, options.batch)
    results: dict[str, Any] = {"batch": options.batch}
    with frozen_objects():
        for part in (part for part in SETTINGS if part in options.parts):
            results[part] = measure_part(part, known[part])
        if "step" in options.parts:
            name, model = next(iter(known["full"].items()))
            results["step"] = {"model": name, "settings": measure_step(model, options.rounds)}
    write("techniques", markdown(results), results, options.out)
    picture(options.out / "techniques.png", results)


@contextlib.contextmanager
def frozen_objects() -> Iterator[None]:
    """The meter looks at every object of the process: spare it those of the libraries."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def measure_part(part: str, known: dict[str, Model]) -> dict[str, dict[str, Any]]:
    """Model -> setting -> bytes kept in all and per layer of each stack; None where there is nothing to patch."""
    settings = SETTINGS[part]
    runs = [(name, setting) for name in known for setting in settings]
    found: dict[str, dict[str, Any]] = {name: {} for name in known}
    for name, setting in track(runs, part, console=Console(stderr=True)):
        found[name][setting] = kept(known[name], settings[setting])
    return found


def kept(model: Model, config: MemSaveConfig | None) -> dict[str, Any] | None:
    """Bytes kept, in all at full depth, by kind of op, and per layer of each stack."""
    affine = at_full_depth(model, config, lambda module, batch: measure_kept(module, batch).by_kind)
    if affine is None:
        return None
    layers = {field: sum(kinds.values()) for field, kinds in affine.per_layer.items()}
    return {"total": sum(affine.total.values()), "per_layer": layers, "by_kind": affine.total}


def at_full_depth(
    model: Model, config: MemSaveConfig | None, measure: Callable[[nn.Module, Any], dict[str, int]]
) -> Affine | None:
    """What ``measure`` says of one layer and, of each stack in turn, of two, carried to the full depth."""
    one = dict.fromkeys(model.depth, 1)
    depths = Depths(model.depth, one, one)
    points = []
    for depth in depths.run:
        module, batch = made(model, depth, config)
        if module is None:
            return None
        points.append(measure(module, batch))
    return Affine.of(points, depths)


def made(model: Model, depth: dict[str, int], config: MemSaveConfig | None) -> tuple[nn.Module | None, Any]:
    """Some layers of a model, patched as ``config`` says, and a batch; None where there is nothing to patch."""
    torch.manual_seed(0)
    module, batch = model.make(depth)
    module.train()
    try:
        if config is not None:
            patch(module, config)
    except PatchError as error:
        if not str(error).startswith("nothing to patch"):
            raise
        return None, batch
    return module, batch


def measure_peak(model: nn.Module, batch: Mapping[str, Any]) -> int:
    """Bytes at the peak of one forward and backward where gradients are accumulated: they are there before."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    return count_peak(lambda: model(**batch).loss.backward()).peak


def measure_step(model: Model, rounds: int) -> dict[str, dict[str, Any]]:
    """Setting -> peak of the whole model in bytes, and seconds of one layer's steps, which alternate."""
    found: dict[str, dict[str, Any]] = {}
    for setting, config in track(STEP.items(), "peaks", console=Console(stderr=True)):
        affine = at_full_depth(model, config, lambda module, batch: {"peak": measure_peak(module, batch)})
        found[setting] = {**affine.total, "kept": kept(model, config)["total"], "seconds": []}
    modules = {setting: made(model, dict.fromkeys(model.depth, 1), config) for setting, config in STEP.items()}
    for index in track(range(rounds + 2), "times", console=Console(stderr=True)):
        for setting, (module, batch) in modules.items():
            start = time.perf_counter()
            module(**batch).loss.backward()
            if index >= 2:  # the first steps allocate
                found[setting]["seconds"].append(time.perf_counter() - start)
    for row in found.values():
        row["median"] = statistics.median(row["seconds"])
    return found


if __name__ == "__main__":
    main()
