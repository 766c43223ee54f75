"""The demo's data: text pairs with a rule to learn, generated here, or a GLUE folder; tokenized either way."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_memsave.data.glue import TASKS, guess_task, read_glue
from hf_memsave.data.wordpiece import train_wordpiece
from hf_memsave.errors import CommandError

NUMBERS = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
NUMBERS += "seventeen eighteen nineteen twenty".split()
_PEOPLE = "sailor baker farmer teacher doctor painter dancer judge".split()
_VERBS = "has finds sells paints keeps".split()
_THINGS = "boats chairs lamps baskets clocks tables books apples".split()
_PLACES = "harbour garden kitchen market school attic".split()

_DEV_EXAMPLES = 500
_VOCABULARY = 8000
_LONGEST = 64
_OTHER = "~"


@dataclass(frozen=True)
class DemoTask:
    """Encoded examples (token ids and "labels"), their tokenizer, and the two lines that describe them."""

    description: str
    limits: str
    labels: int
    tokenizer: PreTrainedTokenizerBase
    train: list[dict[str, Any]]
    dev: list[dict[str, Any]]

    @property
    def majority(self) -> float:
        """The accuracy of always answering what most dev examples say."""
        answers = [example["labels"] for example in self.dev]
        return max(answers.count(label) for label in set(answers)) / len(answers)


def generated_task(train_examples: int, seed: int) -> DemoTask:
    """Returns pairs such as "the baker sells nine lamps in the market" and "the baker has more than six lamps".

    The label says whether the second sentence follows from the first, that is, whether its number is the smaller one.
    """
    rng = random.Random(seed)
    first, second, labels = [], [], []
    for _ in range(train_examples + _DEV_EXAMPLES):
        low, high = sorted(rng.sample(range(len(NUMBERS)), 2))
        person, thing, place = rng.choice(_PEOPLE), rng.choice(_THINGS), rng.choice(_PLACES)
        labels.append(rng.randrange(2))
        said, claimed = (high, low) if labels[-1] else (low, high)
        fact = f"the {person} {rng.choice(_VERBS)} {NUMBERS[said]} {thing}"
        first.append(rng.choice([f"{fact} in the {place}", f"in the {place} {fact}"]))
        second.append(f"the {person} {rng.choice(_VERBS)} more than {NUMBERS[claimed]} {thing}")
    description = f'Generated pairs: does "{second[0]}" follow from "{first[0]}"?'
    return _encoded(description, "", 2, (first, second), labels, train_examples)


def glue_task(data_dir: Path, train_examples: int) -> DemoTask:
    """Returns the first examples of a folder of official GLUE files, whose name tells the task.

    Words of a pair that the other text lacks are one word: no model learns from random weights and a few thousand pairs
    what words mean, but one can learn how much two texts have in common.

    Raises:
        CommandError: The task is no classification.
    """
    task = TASKS[guess_task(data_dir)]
    if not task.labels:
        raise CommandError(
            f"{data_dir}: {task.folder} asks for a score, the demo's models answer with a class. Use another task."
        )
    train, dev = (read_glue(data_dir, task.name, split) for split in ("train", task.validation_splits[0]))
    used, total = min(train_examples, len(train)), f"{len(train):,} and {len(dev):,}"
    train, dev = train.select(range(used)), dev.select(range(min(_DEV_EXAMPLES, len(dev))))
    texts = tuple([*train[column], *dev[column]] for column in task.text)
    limits = f"Used: the first {used:,} training and {len(dev):,} dev examples of {total}, cut to {_LONGEST} tokens."
    if len(texts) == 2:
        texts = tuple([*map(_shared, these, others)] for these, others in (texts, texts[::-1]))
        limits += f' "{_OTHER}" stands for each word that the other text lacks.'
    labels = [*train["label"], *dev["label"]]
    return _encoded(f"{task.folder} from {data_dir}", limits, len(task.labels), texts, labels, used)


def _shared(text: str, other: str) -> str:
    words = {*re.findall(r"\w+", other.lower())}
    return re.sub(r"\w+", lambda word: word[0] if word[0].lower() in words else _OTHER, text)


def _encoded(
    description: str, limits: str, classes: int, texts: tuple[list[str], ...], labels: list[int], train_examples: int
) -> DemoTask:
    """Tokenize with a vocabulary trained on the training texts, which come first."""
    tokenizer = train_wordpiece((text for column in texts for text in column[:train_examples]), _VOCABULARY)
    encoded = {"labels": labels, **tokenizer(*texts, truncation=True, max_length=_LONGEST)}
    examples = [dict(zip(encoded, row, strict=True)) for row in zip(*encoded.values(), strict=True)]
    return DemoTask(description, limits, classes, tokenizer, examples[:train_examples], examples[train_examples:])
