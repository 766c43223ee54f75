"""Texts to train on: plain text files, files of pairs (JSON lines, CSV, TSV), and datasets on the hub."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import datasets

from arguments import UsageError

SUFFIXES = (".json", ".jsonl", ".csv", ".tsv")


def existing(option: str, name: str, wanted: str) -> Path:
    """The file that an option names."""
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"--{option} {path}: expected {wanted}, found no such file. Name one that exists.")
    return path


def read_lines(option: str, name: str) -> datasets.Dataset:
    """A plain text file: its lines with their line breaks, as column "text"."""
    path = existing(option, name, "a plain text file")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(file)
    except UnicodeDecodeError as error:
        raise UsageError(f"--{option} {path}: expected text in UTF-8, got {error.reason}. Convert it.") from error
    if not any(line.strip() for line in lines):
        raise UsageError(f"--{option} {path}: expected some text, got none. Name another file.")
    return datasets.Dataset.from_dict({"text": lines})


def read_pairs(option: str, name: str, columns: tuple[str | None, str | None]) -> datasets.Dataset:
    """A file of examples with columns "text" and "summary": JSON lines, CSV or TSV with a header, by its suffix.

    Of ``columns``, those that are None are the first and the second; ``option`` names the file in messages.
    """
    path = existing(option, name, f"a file of {', '.join(SUFFIXES)}")
    if path.suffix not in SUFFIXES:
        raise UsageError(
            f"--{option} {path}: expected a file of {', '.join(SUFFIXES)}, got {path.suffix!r}. Rename it."
        )
    read = _json_lines if path.suffix.startswith(".json") else _table
    found: dict[str, list[str]] = {"text": [], "summary": []}
    names: tuple[str, str] | None = None
    try:
        for number, row in read(option, path):
            names = names or pick_columns(f"--{option} {path}", list(row), columns)
            for column, source in zip(found, names, strict=True):
                if not isinstance(row.get(source), str):
                    raise UsageError(
                        f"--{option} {path}, line {number}: expected text in {source!r}, got {row.get(source)!r}. "
                        "Correct the line."
                    )
                found[column].append(row[source])
    except UnicodeDecodeError as error:
        raise UsageError(f"--{option} {path}: expected text in UTF-8, got {error.reason}. Convert it.") from error
    if names is None:
        raise UsageError(f"--{option} {path}: expected some examples, got none. Name another file.")
    return datasets.Dataset.from_dict(found)


def read_hub(name: str, config: str | None) -> dict[str, datasets.Dataset]:
    """The splits of a dataset on the hub or in the cache, "train" among them."""
    try:
        splits = datasets.load_dataset(name, config)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--dataset_name {name}: expected to find it on the hub or in the cache, got: {error} "
            "Check its name and --dataset_config_name, or give --train_file instead."
        ) from error
    if "train" not in splits:
        raise UsageError(f"--dataset_name {name}: expected a split 'train', got {', '.join(splits)}. Name another.")
    return dict(splits)


def pick_columns(where: str, known: list[str], wanted: tuple[str | None, ...]) -> tuple[str, ...]:
    """The columns asked for, each by default the one in its place."""
    names = tuple(name or (known[i] if i < len(known) else None) for i, name in enumerate(wanted))
    if missing := [name for name in names if name not in known]:
        what = f"column {missing[0]!r}" if missing[0] else f"{len(wanted)} columns"
        options = " and ".join(f"--{name}_column" for name in ("text", "summary")[: len(wanted)])
        raise UsageError(f"{where}: expected {what}, got {', '.join(map(repr, known))}. Name others with {options}.")
    return names


def renamed(dataset: datasets.Dataset, **columns: str) -> datasets.Dataset:
    """The columns wanted, under new names: ``text="article"`` calls "article" "text"."""
    chosen = dataset.select_columns(list(columns.values()))
    return chosen.rename_columns({old: new for new, old in columns.items() if new != old})


def first(dataset: datasets.Dataset, limit: int | None) -> datasets.Dataset:
    """The first examples."""
    return dataset.select(range(min(limit or len(dataset), len(dataset))))


def _json_lines(option: str, path: Path) -> Iterator[tuple[int, dict]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                row = error
            if not isinstance(row, dict):
                raise UsageError(
                    f"--{option} {path}, line {number}: expected a JSON object on each line, got "
                    f"{row if isinstance(row, Exception) else type(row).__name__}. Correct the line."
                )
            yield number, row


def _table(option: str, path: Path) -> Iterator[tuple[int, dict]]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        header = next(reader, [])
        for row in reader:
            if len(row) not in (0, len(header)):
                raise UsageError(
                    f"--{option} {path}, line {reader.line_num}: expected {len(header)} columns, got {len(row)}. "
                    "Correct the line, or quote its text."
                )
            if row:
                yield reader.line_num, dict(zip(header, row, strict=True))
