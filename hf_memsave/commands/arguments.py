"""The options of each command, and checks of their values, before any large library is loaded."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_memsave.config.config import RUNGS, MemSaveConfig
from hf_memsave.config.fields import did_you_mean
from hf_memsave.config.lora import Lora, adapter_in, lora_in
from hf_memsave.config.names import may_be_type, refuse_missing, refuse_unreachable
from hf_memsave.config.sizes import bytes_of
from hf_memsave.errors import CommandError

#: Sequences, and tokens in each, of a step for which none are given; a model that takes fewer tokens has as many.
BATCH_SIZE, SEQ_LEN = 2, 512
STANDARD_OUTPUT = Path("-")
#: The fields that have an option of their own beside ``--memsave``.
_FIELDS = ("checkpoint", "tiles", "offload", "compile")
_CONFIG = "--memsave --checkpoint --tiles --offload --compile"
_STEP = "--batch-size --seq-len --dtype --autocast --optimizer --lora --quantized --checkpointing --accumulation "
_STEP += "--attention --padded --holds-output --devices --sharding --layers"
_INPUTS = "model --batch --batch-size --seq-len --dtype --autocast --device"  # read by commands.inputs.load_inputs
#: Command -> its options in order, and its description. Options joined by a bar exclude each other.
COMMANDS = {
    "report": (
        f"model --batch {_CONFIG} --batch-size --seq-len --dtype --autocast --lora --layers --json",
        "Lists the modules that patch() changes in a model, and counts what one training step on a CUDA GPU keeps for "
        "backward, stock beside patched. It needs the configuration alone: no weights, no GPU. A few layers of a text "
        "model run on a stand-in for a CUDA device, and further layers are taken to be like them. Any other model runs "
        "whole, on images or sound of the sizes in its configuration, or on your batch.",
    ),
    "estimate": (
        f"model {_CONFIG} {_STEP} --memory --check --html --json",
        "Estimates the peak memory of a training step on a CUDA GPU, stock beside patched. A few layers run on a "
        "stand-in for a CUDA device, where every byte is counted; the full depth follows from them. It leaves out "
        "fragmentation and communication buffers.",
    ),
    "plan": (
        f"model --budget --memsave --main-memory {_STEP} --out --json",
        "Finds the cheapest setting whose training step fits: what runs again in backward, in how many layers, and "
        "whether to offload. It estimates as memsave estimate does; --out writes the configuration.",
    ),
    "demo": (
        "--steps|--quick --out",
        "Trains a small BERT and a small LLaMA from random weights with transformers.Trainer on the CPU, each stock "
        "and patched from the same seed, and compares losses, accuracy, memory kept and time. Exit status 1 if a loss "
        "or a weight differs in a single bit.",
    ),
    "verify": (
        f"{_INPUTS} {_CONFIG} --layers --deterministic --json",
        "Runs one forward and backward of a model, stock and patched, from the same seed, and compares the loss, every "
        "gradient and the bytes kept in between. Exit status 0 if they are equal: to the bit, within twice the "
        "distance of two stock steps (CUDA's kernels add in no fixed order), or up to the order of sums where tiles or "
        "a loss in chunks change it. 1 if they differ, 2 if the step cannot be run.",
    ),
    "auto": (
        f"{_INPUTS} --smart|--fast --memory {_CONFIG} --max-batch --out --json",
        "Tries a model, stock and converted, on a batch, and writes the configuration it found. --smart keeps the "
        "batch, and converts as few blocks of each kind as make it fit. --fast converts everything, if the larger "
        "batch that then fits trains faster. The memory counted is what is kept for backward, parameters, gradients "
        "and AdamW's states; leave room for what backward computes and drops again.",
    ),
    "doctor": (
        f"model {_CONFIG}",
        "Prints what a bug report needs. With a model, also what patch() changes in it, found on the meta device from "
        "its configuration alone. Exit status 1 if something prevents patching, 2 on a wrong argument.",
    ),
}


def add_options(parser: argparse.ArgumentParser, command: str) -> None:
    """Add a command's description and options to its parser."""
    options, parser.description = COMMANDS[command]
    for names in options.split():
        group = parser.add_mutually_exclusive_group() if "|" in names else parser
        for name in names.split("|"):
            group.add_argument(name, **OPTIONS[name] | CHANGES.get(command, {}).get(name, {}))


def parse(parser: argparse.ArgumentParser, of: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Parse a command's arguments, with underscores in options as dashes; ``of`` is the command's own parser."""
    parts = [text.partition("=") if text.startswith("--") else ("", "", text) for text in argv]
    args, unknown = parser.parse_known_args([name.replace("_", "-") + is_ + value for name, is_, value in parts])
    if unknown:
        known = COMMANDS[args.command][0].replace("|", " ").split()
        hint = did_you_mean([unknown[0].partition("=")[0]], known) or "Leave them out."
        is_model = unknown[0] == "--model" and "model" in known
        hint = f"The model is the first argument: {of.prog} {args.model}" if is_model else hint
        of.error(f"unrecognized arguments: {' '.join(unknown)}. {hint}")
    return args


def memsave_of(args: argparse.Namespace) -> MemSaveConfig:
    """Return the config that ``--memsave`` and the options beside it ask for; else ConfigError."""
    fields = {name: value for name in _FIELDS if (value := getattr(args, name, None)) not in (None, False)}
    config = MemSaveConfig.resolve(args.memsave, fields, may_plan=getattr(args, "budget", None) is not None)
    assert config is not None  # a preset's name is none of False
    return config


def memsave_in_words(args: argparse.Namespace) -> str:
    """Describe the config that was asked for, such as "exact, checkpoint gate, offload"."""
    given = {name: value for name in _FIELDS if (value := getattr(args, name, None))}
    return ", ".join([args.memsave, *(name if value is True else f"{name} {value}" for name, value in given.items())])


def check(args: argparse.Namespace) -> None:
    """Raise an error for options that do not go together, or for a model that does not exist."""
    get = vars(args).get
    if args.command != "demo" and memsave_of(args).compile and args.command not in ("report", "doctor"):
        raise CommandError("expected blocks that run op by op, got compile. Leave it out: they keep about as much.")
    if get("autocast") and args.dtype not in (None, "fp32"):
        raise CommandError(f"--autocast: expected fp32 weights, got --dtype {args.dtype}. Leave one out.")
    if "lora" in args and (lora := lora_in(args.model)):
        if args.lora:
            reason = f"--lora: expected a model, got the adapter {args.model}."
            raise CommandError(reason, "Leave it out, or name its base.")
        args.lora = lora
    if get("quantized") and not args.lora:
        raise CommandError("--quantized: expected --lora, as it freezes the model, got none. Add --lora r=8.")
    if get("check") and args.devices > 1:
        raise CommandError(f"--check: expected one device, got --devices {args.devices}. Leave one out.")
    if get("batch") and not args.batch.is_file():
        raise CommandError(f"{args.batch}: no such file. Expected tensors by name, as torch.save writes.")
    if get("batch") and (args.batch_size or args.seq_len):
        raise CommandError("--batch: expected the file's own sizes, got --batch-size or --seq-len. Leave one out.")
    if get("max_batch") and not args.fast:
        raise CommandError("--max-batch: expected --fast, got --smart (the default). Add --fast, or leave it out.")
    if args.command == "auto" and args.memory is None and args.device == "cpu":
        raise CommandError("--device cpu: expected --memory, such as --memory 16GiB, got none. Give the limit.")
    if (name := get("model")) is not None:
        refuse_missing(name, "config.json", *["adapter_config.json"] * (args.command != "doctor"))
        name = adapter_in(name).get("base_model_name_or_path", name)
        if not Path(name).exists() and not may_be_type(name):
            refuse_unreachable(name)


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


def _lora(text: str) -> Lora:
    """Read adapters from ``key=value`` pairs, joined by commas."""
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


def _output(text: str, suffixes: tuple[str, ...] = ()) -> Path:
    """Return a file to write; refuse one in a missing or read-only folder, before the work whose result it is for."""
    path = Path(text)
    if suffixes and path.suffix not in suffixes:
        raise CommandError(f"{path}: expected a name that ends in {' or '.join(suffixes)}. Rename the file.")
    place = path if path.exists() and not path.is_file() else path.resolve().parent
    if not path.parent.is_dir() or path.is_dir() or not os.access(place, os.W_OK):
        expected = "expected a file in a folder that exists and can be written to"
        raise CommandError(f"{path}: {expected}. Create the folder, or name another file.")
    return path


def picture(text: str, suffixes: tuple[str, ...] = (".png", ".pdf", ".svg")) -> Path:
    """Return a file for a picture, or a page with pictures; CommandError also where a library to draw is missing."""
    for name in ("matplotlib", "jinja2"):
        if find_spec(name) is None:
            raise CommandError(f"{text}: pictures need {name}, which is missing. Run: pip install 'hf_memsave[plot]'")
    return _output(text, suffixes)


_UNITS = "24GiB and 24G are 24 x 2^30 bytes, 24GB is 24 x 10^9"
_NUMBER: dict[str, Any] = {"type": _number, "metavar": "N"}
_FLAG: dict[str, Any] = {"action": "store_true"}
#: Option -> arguments of argparse's ``add_argument``.
OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"metavar": "MODEL_OR_CONFIG",
              "help": "a folder with config.json or of a PEFT adapter, such a file, a model type (bert: its "
              "defaults), a known model (llama-3-8b, ...), a name on the hub"},
    "--memsave": {"metavar": "PRESET", "default": "exact", "help": "a preset or YAML file (%(default)s)"},
    "--checkpoint": {"choices": RUNGS, "help": "what runs again in backward: each in turn frees more and takes longer"},
    "--tiles": {"type": lambda text: text if text == "auto" else _number(text), "metavar": "N|auto",
                "help": "run blocks again, MLPs on N tokens of each sequence at a time (auto: 4096 of all)"},
    "--offload": {**_FLAG, "help": "move what is still kept to main memory (for CUDA)"},
    "--compile": {**_FLAG, "help": "compile each repeated block on its own"},
    "--batch": {"type": Path, "metavar": "FILE",
                "help": "the forward's tensors by name: torch.save, .safetensors, .json, .jsonl (an example a line)"},
    "--batch-size": {**_NUMBER, "help": f"sequences on each device ({BATCH_SIZE})"},
    "--seq-len": {**_NUMBER, "help": f"tokens in each ({SEQ_LEN}, or as many as the model takes)"},
    "--dtype": {"choices": ["bf16", "fp16", "fp32"], "help": "dtype of the weights (bf16; with --autocast fp32)"},
    "--autocast": {"choices": ["bf16"], "help": "compute in bf16 with fp32 weights (Trainer's bf16=True)"},
    "--optimizer": {"choices": ["adamw", "adamw_fused", "adamw_8bit", "adafactor", "sgd", "sgd_momentum"],
                    "default": "adamw", "help": "the optimizer (%(default)s)"},
    "--lora": {"type": _lora, "metavar": "r=16,dropout=0.05",
               "help": "train LoRA adapters instead of the model; further keys: alpha, targets=q_proj+v_proj "
               "(all-linear), dtype=fp32|model (fp32, PEFT's default), dora=true"},
    "--quantized": {"choices": ["nf4"], "help": "with --lora, a model in 4 bits (QLoRA)"},
    "--checkpointing": {**_FLAG, "help": "with gradient checkpointing"},
    "--accumulation": {**_NUMBER, "default": 1, "help": "batches in each step (%(default)s)"},
    "--attention": {"choices": "flash efficient cudnn eager".split(), "default": "flash", "help": "kernel (flash)"},
    "--padded": {**_FLAG, "help": "the batch comes with an attention mask"},
    "--holds-output": {**_FLAG, "help": "the loop holds the logits in backward (Trainer does not)"},
    "--devices": {**_NUMBER, "default": 1, "help": "how many GPUs train together (%(default)s)"},
    "--sharding": {"choices": ["ddp", "zero1", "zero2", "fsdp"], "default": "ddp", "help": "over GPUs (%(default)s)"},
    "--layers": {**_NUMBER, "help": "number of layers, instead of the configuration's own"},
    "--device": {"choices": ["cpu", "cuda"], "default": "cpu", "help": "where to run (%(default)s)"},
    "--deterministic": {**_FLAG, "help": "demand equal bits on CUDA too, by PyTorch's deterministic algorithms"},
    "--memory": {"help": f"the limit (on CUDA: nine tenths of what the device has left); {_UNITS}"},
    "--budget": {"required": True, "help": f"memory of each GPU: {_UNITS}"},
    "--main-memory": {"help": "main memory that offload may take, such as 64GiB (any amount)"},
    "--smart": {**_FLAG, "help": "convert as little as makes the batch fit (this is the default)"},
    "--fast": {**_FLAG, "help": "convert everything, or nothing where that trains faster"},
    "--max-batch": {**_NUMBER, "help": "with --fast, the largest batch to try"},
    "--steps": {**_NUMBER, "default": 240, "help": "number of training steps (%(default)s)"},
    "--quick": {"action": "store_const", "dest": "steps", "const": 70, "help": "%(const)s steps"},
    "--check": {**_FLAG, "help": "run the step on this machine's GPU, and compare"},
    "--html": {"type": partial(picture, suffixes=(".html", ".htm")), "metavar": "FILE",
               "help": "write a page with pictures and explanations, all in one file"},
    "--out": {"type": _output, "metavar": "FILE", "help": "write the configuration, as YAML or .json"},
    "--json": {"type": lambda text: STANDARD_OUTPUT if text == "-" else _output(text), "metavar": "FILE",
               "help": "write every figure, in bytes; - writes to standard output, and nothing else goes there"},
}  # fmt: skip
for _name in ("--memory", "--budget", "--main-memory"):
    OPTIONS[_name] |= {"type": partial(bytes_of, name=_name), "metavar": "SIZE"}
_HALVES = {"choices": ["bf16", "fp16"], "help": "compute in 16 bits with fp32 weights (Trainer's bf16=True)"}
_LOADED: dict[str, dict[str, Any]] = {
    "model": {"metavar": "MODEL",
              "help": "the folder of a saved model or PEFT adapter, or a name on the hub; or, for random weights, a "
              "config.json, a model type (bert, llama, ...) or a known model (llama-3-8b, ...)"},
    "--dtype": {"help": "dtype of the weights (as saved; with --autocast fp32)"},
}  # fmt: skip
#: Command -> what differs from OPTIONS.
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "estimate": {"--memsave": {"help": "the preset or YAML file to estimate beside stock (%(default)s)"},
                 "--autocast": _HALVES,
                 "--memory": {"help": f"memory of each GPU, to tell whether the step fits and what would; {_UNITS}"}},
    "plan": {"--memsave": {"help": "a preset or YAML file to begin with (%(default)s)"}, "--autocast": _HALVES},
    "demo": {"--out": {"type": picture, "metavar": "PNG",
                       "help": "the picture to write (demo.png, if matplotlib is installed)"}},
    "verify": {**_LOADED, "--layers": {"help": "number of layers, with random weights (all, or 2 of too many)"}},
    "auto": {**_LOADED, "--memsave": {"help": "a preset or YAML file: what to convert to (%(default)s)"}},
    "doctor": {"model": {"nargs": "?"}},
}  # fmt: skip
