"""The demo's data: text pairs with a rule to learn, generated and tokenized here."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from transformers import BertTokenizer, PreTrainedTokenizerBase

NUMBERS = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
NUMBERS += "seventeen eighteen nineteen twenty".split()
_PEOPLE = "sailor baker farmer teacher doctor painter dancer judge".split()
_VERBS = "has finds sells paints keeps".split()
_THINGS = "boats chairs lamps baskets clocks tables books apples".split()
_PLACES = "harbour garden kitchen market school attic".split()
_OTHERS = "[PAD] [UNK] [CLS] [SEP] [MASK] the in more than".split()

_DEV_EXAMPLES = 500


@dataclass(frozen=True)
class DemoTask:
    """Encoded examples (token ids and "labels", 0 or 1), their tokenizer, and a line that describes them."""

    description: str
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
    words = [*_OTHERS, *NUMBERS, *_PEOPLE, *_VERBS, *_THINGS, *_PLACES]
    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(words)})
    encoded = {"labels": labels, **tokenizer(first, second)}
    examples = [dict(zip(encoded, row, strict=True)) for row in zip(*encoded.values(), strict=True)]
    description = f'Generated pairs: does "{second[0]}" follow from "{first[0]}"?'
    return DemoTask(description, tokenizer, examples[:train_examples], examples[train_examples:])
