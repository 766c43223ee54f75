"""``memsave auto``: what to convert in your own model, for your batch and your memory."""

from __future__ import annotations

import argparse

import yaml

from hf_memsave.commands.arguments import memsave_in_words, memsave_of
from hf_memsave.commands.inputs import load_inputs
from hf_memsave.commands.options import DTYPES, GIVE_ANOTHER_BATCH, console_of, write_figures
from hf_memsave.commands.progress import progress
from hf_memsave.config.sizes import both
from hf_memsave.errors import CommandError, MemSaveError
from hf_memsave.measure.inputs import cannot_run, forward_of
from hf_memsave.planner import fast, smart


def run(args: argparse.Namespace) -> int:
    """Load the model and a batch, try, print and write the plan; return 0."""
    memsave, name, console = memsave_of(args), memsave_in_words(args), console_of(args)
    model, batch, title = load_inputs(args, console)
    forward = forward_of(model, DTYPES.get(args.autocast))
    most = {"max_batch": args.max_batch} if args.fast else {}
    try:
        with progress(console, "Trying ..."):
            plan = (fast if args.fast else smart)(model, batch, memsave, args.memory, forward=forward, **most)
    except MemSaveError:
        raise
    except Exception as error:
        raise CommandError(f"{cannot_run(model, batch, error)} {GIVE_ANOTHER_BATCH}") from error
    console.print(title, style="bold")
    context = [name if memsave.is_exact else f"{name} (gradients are approximate)", args.device]
    context += [f"limit {both(plan.memory)}", *(["bf16 autocast"] if args.autocast else [])]
    console.print(f"preset {', '.join(context)}", str(plan), sep="\n", soft_wrap=True)
    if plan.config is None:
        console.print("Train without memsave: there is no configuration to write.")
    elif args.out is None:
        console.print(yaml.safe_dump(plan.config.to_dict()), end="")
    else:
        plan.config.to_file(args.out)
        console.print(f"Configuration: {args.out}")
    figures = {name: getattr(plan, name) for name in ("batch_size", "memory", "reason", "trials")}
    figures |= {"model": args.model, "config": plan.config and plan.config.to_dict()}
    write_figures(args.json, figures, console)
    return 0
