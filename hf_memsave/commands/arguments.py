"""What each command can be asked, and what is wrong with an answer: told before any library is loaded."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_memsave.config.config import RUNGS, MemSaveConfig
from hf_memsave.config.lora import Lora
from hf_memsave.config.names import refuse_missing, refuse_unreachable
from hf_memsave.config.sizes import bytes_of
from hf_memsave.errors import CommandError

#: Sequences, and tokens in each, of a step for which none are given; a model that takes fewer tokens has as many.
BATCH_SIZE, SEQ_LEN = 2, 512
STANDARD_OUTPUT = Path("-")
#: The fields that have an option of their own beside ``--memsave``.
_MEMSAVE = ("checkpoint", "tiles", "offload", "compile")


def report(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``memsave report``."""
    parser.description = (
        "Lists the sites that patch() finds in a model, and measures what one training step keeps between forward and "
        "backward, stock beside patched. Needs the configuration alone: no weights are read. Of a text model a few "
        "layers are measured on the CPU, and further ones taken to be like those; any other model is run whole, on "
        "images or sound of the sizes in its configuration, or on a batch of yours."
    )
    _add(parser, "model", "--batch")
    add_memsave(parser)
    _add(parser, "--batch-size", "--seq-len", "--dtype", "--autocast", "--lora", "--layers", "--json")


def estimate(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``memsave estimate``."""
    parser.description = (
        "Estimates the peak memory of a training step on a CUDA GPU, stock beside patched. A few layers run on a "
        "stand-in for a CUDA device, where every byte is counted; the full depth follows from them. Not modelled: "
        "fragmentation, and buffers of communication."
    )
    _add(parser, "model")
    add_memsave(parser, "the preset or YAML file to estimate beside stock (%(default)s)")
    _add_step(parser)
    _add(parser, "--memory", help=f"what there is: says whether it fits, and what would; {_SIZES}")
    option = parser.add_argument
    option("--check", action="store_true", help="run the step on this machine's GPU, and compare")
    page = partial(picture, suffixes=(".html", ".htm"))
    option("--html", type=page, metavar="FILE", help="write a page with pictures and explanations, all in one file")
    _add(parser, "--json")


def plan(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``memsave plan``."""
    parser.description = (
        "Finds how many layers have to run how much again in backward, and whether to offload, for a training step to "
        "fit, and writes the configuration. It estimates as memsave estimate does."
    )
    _add(parser, "model")
    _add(parser, "--budget", required=True, help=f"what there is: {_SIZES}")
    _add(parser, "--memsave", help="a preset or YAML file to begin with (%(default)s)")
    speed = "whose speed counts (%(default)s)"
    parser.add_argument("--device", choices=["a100", "h100", "rtx4090"], default="a100", help=speed)
    _add(parser, "--main-memory", help="what offload may take, such as 64GiB (any amount)")
    _add_step(parser)
    _add(parser, "--out", "--json")


def demo(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``memsave demo``."""
    parser.description = (
        "Trains a small BERT and a small LLaMA from random weights with transformers.Trainer on the CPU, each stock "
        "and patched from the same seed, and compares losses, accuracy, kept memory and time. Exit status 1 if a loss "
        "or a weight differs in a single bit."
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", **_NUMBER, default=240, help="so many steps (%(default)s)")
    length.add_argument("--quick", action="store_const", dest="steps", const=70, help="%(const)s steps")
    drawn = "the picture to write (demo.png, if matplotlib is installed)"
    parser.add_argument("--out", type=picture, metavar="PNG", help=drawn)


def verify(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``memsave verify``."""
    parser.description = (
        "Runs one forward and backward of a model, stock and patched, from the same seed, and compares the loss, every "
        "gradient and the bytes kept in between. Exit status 0 if they are equal: to the bit, or, where stock run "
        "twice differs from itself (CUDA's kernels add in no fixed order), within twice that distance. 1 if they "
        "differ, 2 if the step cannot be run."
    )
    _add_inputs(parser)
    add_memsave(parser)
    _add(parser, "--layers", help="with random weights, the depth (all layers, or 2 of too many)")
    how = "ask for equal bits on CUDA too: under PyTorch's deterministic algorithms, attention as products of matrices"
    parser.add_argument("--deterministic", action="store_true", help=how)
    _add(parser, "--json")


def auto(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``memsave auto``."""
    parser.description = (
        "Tries a model, stock and converted, on a batch, and writes the configuration it found. --smart keeps the "
        "batch and converts as few blocks of each kind as it takes to fit; --fast asks whether converting everything "
        "pays, by the larger batch that then fits. Memory is counted: what is kept between forward and backward, "
        "parameters, gradients, and AdamW's state; leave room for what backward computes and drops again."
    )
    _add_inputs(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--smart", action="store_true", help="as few conversions as it takes (this is the default)")
    how.add_argument("--fast", action="store_true", help="everything, or nothing where that trains faster")
    _add(parser, "--memory", help=f"the limit (on CUDA: nine tenths of what the device has left); {_SIZES}")
    add_memsave(parser, "a preset or YAML file: what to convert to (%(default)s)")
    parser.add_argument("--max-batch", **_NUMBER, help="with --fast, the largest batch to try")
    _add(parser, "--out", "--json")


def doctor(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``memsave doctor``."""
    parser.description = (
        "Prints what a bug report needs. With a model, also what patch() changes in it, found on the meta device from "
        "its configuration alone. Exit status 1 if something prevents patching, 2 on a wrong argument."
    )
    _add(parser, "model", nargs="?")
    add_memsave(parser)


def add_memsave(parser: argparse.ArgumentParser, words: str = "a preset or YAML file (%(default)s)") -> None:
    """Add the options that :func:`memsave_of` reads."""
    _add(parser, "--memsave", help=words)
    again = "what of each block runs again in backward: each in turn frees more, and takes more time"
    parser.add_argument("--checkpoint", choices=RUNGS, help=again)
    sizes = "run blocks again, MLPs on so many tokens of each sequence at a time (auto: 4096 of all)"
    parser.add_argument(
        "--tiles", type=lambda text: text if text == "auto" else _positive_int(text), metavar="N|auto", help=sizes
    )
    parser.add_argument("--offload", action="store_true", help="what is still kept goes to main memory (for CUDA)")
    parser.add_argument("--compile", action="store_true", help="compile each repeated block by itself")


def memsave_of(args: argparse.Namespace) -> MemSaveConfig:
    """The configuration that ``--memsave`` and the options beside it ask for; else ConfigError."""
    fields = {name: value for name in _MEMSAVE if (value := getattr(args, name, None)) not in (None, False)}
    config = MemSaveConfig.resolve(args.memsave, fields, may_plan=getattr(args, "budget", None) is not None)
    assert config is not None  # a preset's name is none of False
    return config


def memsave_in_words(args: argparse.Namespace) -> str:
    """What was asked for, such as "exact, checkpoint gate, offload"."""
    named = [f"{name} {value}" for name in _MEMSAVE[:2] if (value := getattr(args, name, None))]
    flags = [name for name in _MEMSAVE[2:] if getattr(args, name, False)]
    return ", ".join([args.memsave, *named, *flags])


def check(args: argparse.Namespace) -> None:
    """Raise the error of options that do not go together, or name what is not there."""
    given = vars(args)
    if args.command != "demo" and memsave_of(args).compile and args.command not in ("report", "doctor"):
        raise CommandError("expected blocks that run op by op, got compile. Leave it out: compiled, they keep as much.")
    if given.get("autocast") and args.dtype not in (None, "fp32"):
        raise CommandError(f"--autocast computes with fp32 weights, got --dtype {args.dtype}. Leave one out.")
    if given.get("quantized") and not args.lora:
        raise CommandError("--quantized freezes the model: expected --lora. Add --lora r=8, or leave it out.")
    if given.get("check") and args.devices > 1:
        raise CommandError(f"--check runs the step on one device, got --devices {args.devices}. Leave one out.")
    if given.get("batch") and (args.batch_size or args.seq_len):
        raise CommandError("--batch brings its own sizes, got --batch-size or --seq-len as well. Leave one out.")
    if args.command == "auto" and args.max_batch and not args.fast:
        raise CommandError("--max-batch limits the batches of --fast, got --smart. Add --fast, or leave it out.")
    if args.command == "auto" and args.memory is None and args.device == "cpu":
        raise CommandError("--device cpu: expected --memory, such as --memory 16GiB, got none. Say how much there is.")
    if "/" in (name := given.get("model") or "") and not Path(name).exists():  # without one, it may be a model type
        refuse_unreachable(name)


def _model(text: str, further: str = "config.json") -> str:
    refuse_missing(text, "config.json", further)
    return text


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def _lora(text: str) -> Lora:
    """Adapters from ``key=value`` pairs, joined by commas."""
    defaults = asdict(Lora())
    given: dict[str, Any] = {}
    for pair in text.split(","):
        key, _, value = pair.partition("=")
        if key not in defaults or not all(value.split("+")) or key in given:
            keys = ",".join(f"{k}=..." for k in defaults)
            raise CommandError(f"--lora: expected {keys}, each once, got {pair!r}. Correct that.")
        try:
            given[key] = {"true": True, "false": False}[value] if key == "dora" else type(defaults[key])(value)
        except (KeyError, ValueError) as error:
            expected = "dora=true or dora=false" if key == "dora" else f"a number for {key}"
            raise CommandError(f"--lora: expected {expected}, got {value!r}. Correct that.") from error
    return Lora(**given)


def _batch(text: str) -> Path:
    if not Path(text).is_file():
        raise CommandError(f"{text}: no such file. Expected tensors by name, as torch.save(dict(batch), ...) writes.")
    return Path(text)


def _output(text: str, suffixes: tuple[str, ...] = ()) -> Path:
    """A file to write: refused, before the work that it is to show, in a folder that is not there or is read-only."""
    path = Path(text)
    if suffixes and path.suffix not in suffixes:
        raise CommandError(f"{path}: expected a name that ends in {' or '.join(suffixes)}. Rename the file.")
    place = path if path.exists() and not path.is_file() else path.resolve().parent
    if not path.parent.is_dir() or path.is_dir() or not os.access(place, os.W_OK):
        expected = "expected a file in a folder that exists and can be written to"
        raise CommandError(f"{path}: {expected}. Create the folder, or name another file.")
    return path


def picture(text: str, suffixes: tuple[str, ...] = (".png", ".pdf", ".svg")) -> Path:
    """A picture to write, or a page with pictures; CommandError as well where what draws it is missing."""
    for name in ("matplotlib", "jinja2"):
        if find_spec(name) is None:
            raise CommandError(f"{text}: pictures need {name}, which is missing. Run: pip install 'hf_memsave[plot]'")
    return _output(text, suffixes)


_SIZES = "24GiB and 24G are 24 x 2^30 bytes, 24GB is 24 x 10^9"
_NUMBER: dict[str, Any] = {"type": _positive_int, "metavar": "N"}
#: Option -> what argparse is told of it.
_SHARED: dict[str, dict[str, Any]] = {
    "model": {
        "type": _model, "metavar": "MODEL_OR_CONFIG",
        "help": "a folder with config.json, such a file, a model type (bert: its defaults), a name on the hub",
    },
    "--memsave": {"metavar": "PRESET", "default": "exact"},
    "--batch": {
        "type": _batch, "metavar": "FILE",
        "help": "what the forward takes, tensors by name: torch.save, .safetensors, .json, .jsonl (examples)",
    },
    "--batch-size": {**_NUMBER, "help": f"sequences on each device ({BATCH_SIZE})"},
    "--seq-len": {**_NUMBER, "help": f"tokens in each ({SEQ_LEN}, or as many as the model takes)"},
    "--dtype": {"choices": ["bf16", "fp16", "fp32"], "help": "of the weights (bf16; with --autocast fp32)"},
    "--autocast": {"choices": ["bf16"], "help": "compute in bf16 with fp32 weights (Trainer's bf16=True)"},
    "--lora": {
        "type": _lora, "metavar": "r=16,dropout=0.05",
        "help": "train LoRA adapters instead of the model; further keys: alpha, targets=q_proj+v_proj (all-linear), "
        "dtype=fp32|model (fp32, PEFT's default), dora=true",
    },
    "--layers": {**_NUMBER, "help": "the depth, instead of the configuration's own"},
    "--json": {
        "type": lambda text: STANDARD_OUTPUT if text == "-" else _output(text), "metavar": "FILE",
        "help": "write every figure, in bytes; - for standard output, where nothing else is then written",
    },
    "--out": {"type": _output, "metavar": "FILE", "help": "write the configuration, as YAML or .json"},
}  # fmt: skip
for _name in ("--memory", "--budget", "--main-memory"):
    _SHARED[_name] = {"type": partial(bytes_of, name=_name), "metavar": "SIZE"}


def _add(parser: argparse.ArgumentParser, *names: str, **changes: Any) -> None:
    """Add options by name; ``changes`` are to all of them."""
    for name in names:
        parser.add_argument(name, **_SHARED[name] | changes)


def _add_step(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a training step."""
    option = parser.add_argument
    _add(parser, "--batch-size", "--seq-len", "--dtype")
    in_16_bits = "compute in 16 bits with fp32 weights (Trainer's bf16=True)"
    _add(parser, "--autocast", choices=["bf16", "fp16"], help=in_16_bits)
    optimizers = ["adamw", "adamw_fused", "adamw_8bit", "adafactor", "sgd", "sgd_momentum"]
    option("--optimizer", choices=optimizers, default="adamw", help="(%(default)s)")
    _add(parser, "--lora")
    option("--quantized", choices=["nf4"], help="with --lora, a base in 4 bits (QLoRA)")
    option("--checkpointing", action="store_true", help="with gradient checkpointing")
    option("--accumulation", **_NUMBER, default=1, help="batches a step (%(default)s)")
    option("--attention", choices=["flash", "efficient", "cudnn", "eager"], default="flash", help="(%(default)s)")
    option("--padded", action="store_true", help="the batch comes with an attention mask")
    option("--holds-output", action="store_true", help="the loop holds the logits in backward (Trainer does not)")
    option("--devices", **_NUMBER, default=1, help="how many GPUs train together (%(default)s)")
    option("--sharding", choices=["ddp", "zero1", "zero2", "fsdp"], default="ddp", help="over the GPUs (%(default)s)")
    _add(parser, "--layers")


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`hf_memsave.commands.inputs.load_inputs` reads."""
    model = "the folder of a saved model or PEFT adapter, or a name on the hub; or, for random weights, a config.json"
    kind = partial(_model, further="adapter_config.json")
    _add(parser, "model", type=kind, metavar="MODEL", help=f"{model} or a model type (bert, llama, ...)")
    _add(parser, "--batch", "--batch-size", "--seq-len")
    _add(parser, "--dtype", help="of the weights (as saved; with --autocast fp32)")
    _add(parser, "--autocast")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where to run (%(default)s)")
