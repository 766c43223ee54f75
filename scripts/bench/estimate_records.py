"""Compare ``hf_memsave.estimate`` with public records of peak memory, unfitted.

What was recorded, of which model and how it was trained is in ``estimate_records.json`` beside this file.

Run: ``python scripts/bench/estimate_records.py [--out FOLDER] [--only PART_OF_A_NAME]``; writes
``estimate-records.json`` and ``.md``. Rows that are not run stay as they are.
"""

from __future__ import annotations

import gc
import json
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from hf_memsave import MemSaveError, estimate
from hf_memsave.config.lora import Lora
from hf_memsave.errors import MeasureError
from hf_memsave.measure.estimate import Estimate
from publish import RESULTS, arguments, as_json
from publish import table as markdown

DATA = Path(__file__).with_suffix(".json")
INTRODUCTION = """# Estimates against public records

What others measured in their training runs, beside what `hf_memsave.estimate` says of the same settings: stock, on one
GPU unless a row says otherwise, and nothing fitted. `python scripts/bench/estimate_records.py` writes this table; the
settings are in `scripts/bench/estimate_records.json`."""


def put_adapters(record: dict[str, Any], model: PreTrainedModel) -> None:
    """Freeze the model and put a record's adapters into it; a MeasureError where they work outside of its layers."""
    from peft import PeftConfig, get_peft_model

    config = PeftConfig.from_peft_type(**record["adapter"])
    if config.is_prompt_learning or config.is_adaption_prompt:
        raise MeasureError(f"{config.peft_type}: expected adapters in layers, got ones that change the input.")
    get_peft_model(model, config, autocast_adapter_dtype=record.get("autocast_adapter_dtype", True))


def estimated(record: dict[str, Any], config: PreTrainedConfig, common: dict[str, Any]) -> Estimate:
    """The estimate of a record's training; with adapters of any kind in place of LoRA's."""
    training = {**common, **record.get("training", {}), "memsave": False}
    if "adapter" not in record:
        return estimate(config, **training)
    with (
        mock.patch("hf_memsave.measure.training.add_adapters", lambda model, _: put_adapters(record, model)),
        mock.patch.dict("hf_memsave.measure.depth._KNOWN", clear=True),
    ):
        return estimate(config, lora=Lora(), **training)


def measured(record: dict[str, Any], source: dict[str, Any], models: dict[str, Any]) -> dict[str, Any]:
    """The estimate of one record, or why there is none; bytes."""
    begin = time.perf_counter()
    try:
        fields = models[record.get("model", source.get("model"))]
        config = CONFIG_MAPPING[fields["model_type"]](**fields)
        result = estimated(record, config, source["training"])
    except MemSaveError as error:
        return {"why_not": _why_not(error)}
    trained = record.get("trained", result.stock.numbers["trained"])
    if trained != result.stock.numbers["trained"]:
        return {"why_not": f"{trained:,} numbers were trained, and the model made here has another number"}
    return {
        "estimated": result.stock.peak,
        "difference": result.stock.peak / record["recorded"] - 1,
        "where": result.stock.where,
        "seconds": round(time.perf_counter() - begin),
    }


def _why_not(error: MemSaveError) -> str:
    """What stands in the way: mostly that PEFT makes adapters from the values of weights."""
    cause = error.__cause__
    if cause is None:
        return str(error).splitlines()[0]
    return f"PEFT makes it from the values of weights, and there are none ({type(cause).__name__})"


def table(data: dict[str, Any], found: dict[str, dict[str, Any]]) -> str:
    """All of it, in Markdown."""
    parts = [INTRODUCTION]
    for name, source in data["sources"].items():
        rows, missing = [], []
        for record in source["records"]:
            one = found.get(f"{name}: {record['name']}", {"why_not": "not run"})
            if "why_not" in one:
                missing.append(f"{record['name']} ({record['recorded'] / 1e9:.2f} GB): {one['why_not']}")
            else:
                rows.append((record, one))
        differences = [one["difference"] for _, one in rows]
        parts += ["", f"## {name}", "", source["description"], ""]
        if rows:
            said = f"{len(rows)} rows: from {min(differences):+.1%} to {max(differences):+.1%}; "
            parts += [f"{said}{sum(abs(d) <= 0.07 for d in differences)} within 7%.", ""]
            header = ["what", "recorded GB", "estimated GB", "difference"]
            parts.append(markdown(header, (cells(record, one) for record, one in rows)).rstrip())
        if missing:
            parts += ["", "Not estimated:", "", *(f"- {line}" for line in missing)]
    return "\n".join(parts) + "\n"


def cells(record: dict[str, Any], one: dict[str, Any]) -> list[str]:
    """Of a row."""
    note = f" ({record['note']})" if "note" in record else ""
    sizes = [f"{nbytes / 1e9:.2f}" for nbytes in (record["recorded"], one["estimated"])]
    return [f"{record['name']}{note}", *sizes, f"{one['difference']:+.1%}"]


def main() -> None:
    """Estimate what was asked for, and write the table."""
    parser = arguments(__doc__, RESULTS)
    parser.add_argument("--only", default="", help="rows whose source or name has this in it")
    parser.add_argument("--missing", action="store_true", help="of these, rows that have not been run")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    data = json.loads(DATA.read_text(encoding="utf-8"))
    out = args.out / "estimate-records.json"
    found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    for name, source in data["sources"].items():
        for record in source["records"]:
            key = f"{name}: {record['name']}"
            if args.only not in key or (args.missing and key in found):
                continue
            found[key] = measured(record, source, data["models"])
            print(key, found[key], flush=True)
            gc.collect()
            out.write_text(as_json(found) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(table(data, found), encoding="utf-8")


if __name__ == "__main__":
    main()
