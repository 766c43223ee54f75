"""GLUE from the official TSV files: nine tasks, the same columns and label ids as ``nyu-mll/glue`` on the hub.

The files are split on tabs and quotes mean nothing (Wang et al., 2019, arXiv:1804.07461). Columns are found by the
names in each file's own header, so the files may hold more columns than are read.
"""

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import datasets

from arguments import UsageError


@dataclass(frozen=True, kw_only=True)
class GlueTask:
    """One GLUE task: where its examples are in the official files, and what they become."""

    name: str  # on the hub, as in ``load_dataset("nyu-mll/glue", name)``
    folder: str  # in the official download
    text: Mapping[str, str]  # column of the dataset -> column of the file, one or two of them
    labels: tuple[str, ...]  # class names in the order of their ids; empty for regression
    label_column: str = "label"  # of the file
    labels_are_ids: bool = True  # the files write class ids, not class names
    files: Mapping[str, str] = field(  # split on the hub -> file name
        default_factory={"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"}.copy
    )
    headerless: tuple[str, ...] = ()  # the columns of the train and dev files, where those do not name them
    broken_lines: float = 0.0  # the share of lines that may have other columns; they are left out with a warning

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
        with contextlib.suppress(ValueError):
            if math.isfinite(score := float(written)):
                return score
        return None


_ONE = {"sentence": "sentence"}
_PAIR = {"sentence1": "sentence1", "sentence2": "sentence2"}

TASKS: dict[str, GlueTask] = {
    task.name: task
    for task in (
        GlueTask(
            name="cola", folder="CoLA", text=_ONE, labels=("unacceptable", "acceptable"),
            headerless=("source", "label", "mark", "sentence"),
        ),
        GlueTask(name="sst2", folder="SST-2", text=_ONE, labels=("negative", "positive")),
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
        UsageError: If the file does not exist, or a line is not what the task says.
    """
    spec = TASKS[task]
    path = _find(Path(data_dir), spec.files[split], spec.folder)
    is_test = split.startswith("test")
    lines = _split_lines(path)
    header = (not is_test and spec.headerless) or next(lines, (0, []))[1]
    labelled = not is_test or spec.label_column in header
    if missing := {*spec.text.values(), *[spec.label_column] * labelled}.difference(header):
        raise UsageError(
            f"{path}, line 1: expected the columns of {spec.folder}, got {', '.join(header) or 'an empty file'}; "
            f"missing are {', '.join(sorted(missing))}. Use the official file with its header line, or name the task "
            "the file belongs to."
        )

    examples, broken, index = [], [], -1
    for index, (number, cells) in enumerate(lines):
        if len(cells) != len(header):
            broken.append(
                f"{path}, line {number}: expected {len(header)} columns separated by tabs ({', '.join(header)}), got "
                f"{len(cells)}. Put one example on a line, with no tab or line break inside a text; quotes do not "
                "protect them."
            )
            continue
        row = dict(zip(header, cells, strict=True))
        label = spec.label_id(row[spec.label_column]) if labelled else -1
        if label is None:
            raise UsageError(
                f"{path}, line {number}: expected {', '.join(spec.label_names) or 'a number'} in column "
                f"{spec.label_column}, got {row[spec.label_column]!r}. Correct the line, or name the file's task."
            )
        examples.append((*(row[column] for column in spec.text.values()), label, index))
    if len(broken) > spec.broken_lines * (index + 1):
        raise UsageError(broken[0])
    if broken:
        warnings.warn(f"{len(broken)} of {index + 1} lines left out. The first: {broken[0]}", stacklevel=2)
    if not examples:
        raise UsageError(f"{path}: expected one example on each line, got none. Fetch the file again.")

    label = datasets.ClassLabel(names=list(spec.labels)) if spec.labels else datasets.Value("float32")
    features = {name: datasets.Value("string") for name in spec.text} | {"label": label, "idx": datasets.Value("int32")}
    columns = dict(zip(features, map(list, zip(*examples, strict=True)), strict=True))
    return datasets.Dataset.from_dict(columns, features=datasets.Features(features), split=split)


def folder_of(data_dir: str, task: str) -> str:
    """The task's folder, which ``data_dir`` is, or has in it.

    Raises:
        UsageError: It is not there.
    """
    wanted = TASKS[task].folder
    for folder in (Path(data_dir, wanted), Path(data_dir)):
        if folder.is_dir() and _key(folder) == task:
            return str(folder)
    raise UsageError(
        f"--data_dir {data_dir}: expected the folder of {wanted}, or one with it in it, found none. Name that folder."
    )


def guess_task(data_dir: str | Path) -> str:
    """Returns the key in `TASKS` of a folder, by its name, such as "CoLA" or "sst-2".

    Raises:
        UsageError: No task has its name.
    """
    name, key = Path(data_dir).resolve().name, _key(data_dir)
    if key not in TASKS:
        folders = ", ".join(task.folder for task in TASKS.values())
        within = next((folder for task in TASKS.values() if (folder := Path(data_dir, task.folder)).is_dir()), "")
        remedy = f"Name the task's, as in --data_dir {within}" if within else "Rename it"
        raise UsageError(f"{data_dir}: expected a folder named after a task ({folders}), got {name!r}. {remedy}.")
    return key


def _key(folder: str | Path) -> str:
    return Path(folder).resolve().name.lower().replace("-", "").replace("_", "")


def _find(folder: Path, name: str, wanted: str) -> Path:
    """The file of that name."""
    if (folder / name).is_file():
        return folder / name
    found = ", ".join(sorted(file.name for file in folder.iterdir())) if folder.is_dir() else "no such folder"
    raise UsageError(
        f"{folder / name}: expected this file of the official {wanted} data, found {found or 'an empty folder'}. "
        "Name the folder that holds it, or copy it there."
    )


def _split_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the 1-based number and the cells of each line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UsageError(
                    f"{path}, line {number}: expected UTF-8 text, got byte {line[error.start]:#04x}. "
                    "Convert the file to UTF-8."
                ) from error
            if text:
                yield number, text.split("\t")
