"""Seconds until a command answers, as a whole process, beside those of another checkout in turn.

    python scripts/bench/command_times.py [--before CHECKOUT] [--repeats N] [--only PART] [--out [DIR]]

The median of the runs. Half of the time of a short one goes to importing PyTorch and Transformers, which is measured
too; where optional quantization libraries are installed, Transformers imports them as well, which takes twice as long.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hf_memsave.config.names import shape_of
from publish import arguments, publish, versions

ROOT = Path(__file__).resolve().parents[2]
#: Name of a file -> a configuration.
CONFIGS = {
    "llama-8b": shape_of("llama-3.1-8b"), "llama-70b": shape_of("llama-3.1-70b"),
    "mixtral-8x7b": {"model_type": "mixtral"},
}  # fmt: skip
#: Command -> the most seconds that it may take, on two idle cores.
COMMANDS = {
    "report bert": 4,
    "estimate llama-8b --lora r=16": 8,
    "estimate llama-70b --lora r=16": 16,
    "estimate mixtral-8x7b --lora r=16,targets=q_proj+v_proj": 16,
    "estimate t5 --memory 24GiB": 20,
    "plan llama-8b --lora r=16 --batch-size 1 --seq-len 131072 --budget 80GiB": 30,
}
_IMPORT = "from transformers import PreTrainedModel; import hf_memsave.measure.estimate"


def seconds(checkout: Path, command: list[str], folder: str) -> float:
    """Run a command of the code in ``checkout``, in a process of its own; its seconds."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    subprocess.run([sys.executable, *command], cwd=folder, env=environment, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Time all, and write the table."""
    parser = arguments(__doc__)
    parser.add_argument("--before", type=Path, help="another checkout, to compare with")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="commands with this in them")
    args = parser.parse_args()
    checkouts = {"before": args.before.resolve()} if args.before else {}
    checkouts["now"] = ROOT
    asked = {"the import alone": ["-c", _IMPORT]}
    asked |= {f"`memsave {line}`": ["-m", "hf_memsave.cli", *line.split()] for line in COMMANDS if args.only in line}
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, config in CONFIGS.items():
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "config.json").write_text(json.dumps(config))
        for name, command in asked.items():
            runs = [{of: seconds(home, command, folder) for of, home in checkouts.items()} for _ in range(args.repeats)]
            results[name] = {of: round(statistics.median(run[of] for run in runs), 2) for of in checkouts}
            print(name, results[name], flush=True)
    bars = {f"`memsave {line}`": bar for line, bar in COMMANDS.items()}
    rows = [[name, *(f"{n:.1f}" for n in of.values()), str(bars.get(name, ""))] for name, of in results.items()]
    title = f"# How long a command takes\n\nSeconds, the median of {args.repeats} runs of whole processes in turn; "
    title += f"no model is on the machine, and no GPU. {versions()}."
    publish("command-times", title, ["command", *(f"{of}, s" for of in checkouts), "at most"], rows, results, args.out)


if __name__ == "__main__":
    main()
