"""GLUE from the official TSV files: nine tasks, the same columns and label ids as ``nyu-mll/glue`` on the hub.

The files are split on tabs and quotes mean nothing (Wang et al., 2019, arXiv:1804.07461). Columns are found by the
names in each file's own header, so the files may hold more columns than are read.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hf_memsave.errors import MemSaveError

_Value = TypeVar("_Value")

if TYPE_CHECKING:
    import datasets


class GlueDataError(MemSaveError, ValueError):
    """A GLUE folder or file that is missing, malformed or not what the task says."""


#: Split on the hub -> file name.
_FILES = {"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"}


@dataclass(frozen=True, kw_only=True)
class GlueTask:
    """One GLUE task: where its examples are in the official files, and what they become.

    Attributes:
        name: The task on the hub, as in ``load_dataset("nyu-mll/glue", name)``.
        folder: The folder in the official download.
        text: Column of the dataset -> column of the file, one or two of them.
        labels: Class names in the order of their ids; empty for regression.
        label_column: The file's column with the label.
        labels_are_ids: The files write class ids, not class names.
        files: Split on the hub -> file name.
        headerless: The columns of the train and dev files, for the one task whose files do not name them.
        broken_lines: The share of lines that may have a wrong number of columns; they are left out with a warning.
    """

    name: str
    folder: str
    text: Mapping[str, str]
    labels: tuple[str, ...]
    label_column: str = "label"
    labels_are_ids: bool = True
    files: Mapping[str, str] = field(default_factory=_FILES.copy)
    headerless: tuple[str, ...] = ()
    broken_lines: float = 0.0

    @cached_property
    def label_names(self) -> tuple[str, ...]:
        """The labels as the official files write them."""
        return tuple(map(str, range(len(self.labels)))) if self.labels_are_ids else self.labels

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The dataset's text columns, in the order in which a tokenizer takes them."""
        return tuple(self.text)

    @property
    def validation_splits(self) -> tuple[str, ...]:
        """The splits to evaluate on: two for MNLI, else one."""
        return tuple(split for split in self.files if split.startswith("validation"))

    @property
    def test_splits(self) -> tuple[str, ...]:
        """The unlabelled splits to predict: two for MNLI, else one."""
        return tuple(split for split in self.files if split.startswith("test"))

    def label_id(self, written: str) -> int | float | None:
        """The label as the model sees it, or None if this task has no such label."""
        if self.labels:
            return self.label_names.index(written) if written in self.label_names else None
        try:
            score = float(written)
        except ValueError:
            return None
        return score if math.isfinite(score) else None


_PAIR = {"sentence1": "sentence1", "sentence2": "sentence2"}

TASKS: dict[str, GlueTask] = {
    task.name: task
    for task in (
        GlueTask(
            name="cola", folder="CoLA", text={"sentence": "sentence"}, labels=("unacceptable", "acceptable"),
            headerless=("source", "label", "mark", "sentence"),
        ),
        GlueTask(name="sst2", folder="SST-2", text={"sentence": "sentence"}, labels=("negative", "positive")),
        GlueTask(
            name="mrpc", folder="MRPC", text={"sentence1": "#1 String", "sentence2": "#2 String"},
            labels=("not_equivalent", "equivalent"), label_column="Quality",
        ),
        GlueTask(
            name="qqp", folder="QQP", text={"question1": "question1", "question2": "question2"},
            labels=("not_duplicate", "duplicate"), label_column="is_duplicate",
            broken_lines=1e-3,  # a few questions in the official train.tsv contain a line break
        ),
        GlueTask(name="stsb", folder="STS-B", text=_PAIR, labels=(), label_column="score"),
        GlueTask(
            name="mnli", folder="MNLI", text={"premise": "sentence1", "hypothesis": "sentence2"},
            labels=("entailment", "neutral", "contradiction"), label_column="gold_label", labels_are_ids=False,
            files={
                "train": "train.tsv",
                "validation_matched": "dev_matched.tsv", "validation_mismatched": "dev_mismatched.tsv",
                "test_matched": "test_matched.tsv", "test_mismatched": "test_mismatched.tsv",
            },
        ),
        GlueTask(
            name="qnli", folder="QNLI", text={"question": "question", "sentence": "sentence"},
            labels=("entailment", "not_entailment"), labels_are_ids=False,
        ),
        GlueTask(name="rte", folder="RTE", text=_PAIR, labels=("entailment", "not_entailment"), labels_are_ids=False),
        GlueTask(name="wnli", folder="WNLI", text=_PAIR, labels=("not_entailment", "entailment")),
    )
}  # fmt: skip


def read_glue(data_dir: str | Path, task: str, split: str) -> datasets.Dataset:
    """Returns one split of one task (of :data:`TASKS`, named as on the hub) from a folder of official GLUE files.

    Its columns are the task's text columns, "label" (-1 where the file has none) and "idx" (row of the file).

    Raises:
        GlueDataError: If the task, the split or the file does not exist, or a line is not what the task says.
    """
    import datasets

    spec = _lookup(task, TASKS, "GLUE task")
    path = _find(Path(data_dir), [_lookup(split, spec.files, f"{spec.folder} split")], spec.folder)
    unlabelled = split.startswith("test")
    lines = _split_lines(path)
    header = _header(lines, () if unlabelled else spec.headerless)
    labelled = not unlabelled or spec.label_column in header
    missing = [name for name in (*spec.text.values(), *[spec.label_column] * labelled) if name not in header]
    if missing:
        raise GlueDataError(
            f"{path}, line 1: expected the columns of {spec.folder}, got {_listed(header) or 'an empty file'}; missing "
            f"are {_listed(missing)}. Use the official file with its header line, or name the task the file belongs to."
        )

    columns: dict[str, list[Any]] = {name: [] for name in (*spec.text, "label", "idx")}
    for index, number, row in _rows(path, spec, header, lines):
        label = spec.label_id(row[spec.label_column]) if labelled else -1
        if label is None:
            raise GlueDataError(
                f"{path}, line {number}: expected {_listed(spec.label_names) or 'a number'} in column "
                f"{spec.label_column}, got {row[spec.label_column]!r}. Correct the line, or name the file's task."
            )
        for name, column in spec.text.items():
            columns[name].append(row[column])
        columns["label"].append(label)
        columns["idx"].append(index)
    if not columns["idx"]:
        raise GlueDataError(f"{path}: expected one example on each line, got none. Fetch the file again.")

    label = datasets.ClassLabel(names=list(spec.labels)) if spec.labels else datasets.Value("float32")
    features = {name: datasets.Value("string") for name in spec.text} | {"label": label, "idx": datasets.Value("int32")}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features), split=split)


def guess_task(data_dir: str | Path) -> str:
    """Returns the key in `TASKS` of a folder, by its name, else by the columns and first label of its training file.

    Raises:
        GlueDataError: If neither tells the task.
    """
    folder = Path(data_dir)
    by_name = folder.resolve().name.lower().replace("-", "").replace("_", "")
    if by_name in TASKS:
        return by_name

    path = _find(folder, ["train.tsv", "dev.tsv", "dev_matched.tsv"], "GLUE")
    matches = []
    for task in TASKS.values():
        lines = _split_lines(path)
        header = _header(lines, task.headerless)
        _, cells = next(lines, (0, []))
        if len(cells) == len(header) and {*task.text.values(), task.label_column} <= set(header):
            if task.label_id(cells[header.index(task.label_column)]) is not None:
                matches.append(task)
    if not matches:
        raise GlueDataError(
            f"{path}: expected the columns of a GLUE task, got {_listed(header) or 'an empty file'}. "
            f"Use the official file with its header line, or name the folder after its task: {_listed(TASKS)}."
        )
    return max(matches, key=lambda task: len(task.text)).name  # SST-2's columns are among QNLI's


def _lookup(name: str, table: Mapping[str, _Value], what: str) -> _Value:
    if name not in table:
        raise GlueDataError(f"{what}: expected one of {_listed(table)}, got {name!r}. Name one of them.")
    return table[name]


def _find(folder: Path, names: list[str], wanted: str) -> Path:
    """The first of the files that exists."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    found = _listed(sorted(file.name for file in folder.iterdir())) if folder.is_dir() else "no such folder"
    raise GlueDataError(
        f"{folder / names[0]}: expected this file of the official {wanted} data, found {found or 'an empty folder'}. "
        "Name the folder that holds it, or copy it there."
    )


def _header(lines: Iterator[tuple[int, list[str]]], header: tuple[str, ...]) -> tuple[str, ...]:
    """The columns: taken from the lines, unless given."""
    return header or tuple(next(lines, (0, []))[1])


def _split_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the 1-based number and the cells of each line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise GlueDataError(
                    f"{path}, line {number}: expected UTF-8 text, got byte {line[error.start]:#04x}. "
                    "Convert the file to UTF-8."
                ) from error
            if text:
                yield number, text.split("\t")


def _rows(
    path: Path, task: GlueTask, header: tuple[str, ...], lines: Iterator[tuple[int, list[str]]]
) -> Iterator[tuple[int, int, dict[str, str]]]:
    """Yield the index from 0, the line number and the cells by column of each line that has the header's columns."""
    broken, total = [], 0
    for index, (number, cells) in enumerate(lines):
        total = index + 1
        if len(cells) == len(header):
            yield index, number, dict(zip(header, cells, strict=True))
        else:
            broken.append(
                f"{path}, line {number}: expected {len(header)} columns separated by tabs ({_listed(header)}), got "
                f"{len(cells)}. Put one example on a line, with no tab or line break inside a text; quotes do not "
                "protect them."
            )
    if len(broken) > task.broken_lines * total:
        raise GlueDataError(broken[0])
    if broken:
        warnings.warn(f"{len(broken)} of {total} lines left out. The first: {broken[0]}", stacklevel=3)


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(str, names))
