"""BERT's WordPiece tokenizer without a hub: trained on given texts, or read from a ``vocab.txt``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from transformers import BertTokenizer, PreTrainedTokenizerFast

from hf_memsave.errors import MemSaveError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_MAX_ALPHABET = 1000


class VocabularyError(MemSaveError, ValueError):
    """A vocabulary that cannot be trained or read."""


def train_wordpiece(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Returns a lower-casing tokenizer with BERT's special tokens; equal texts give equal ids in every process.

    Raises:
        VocabularyError: If there is no text, or `vocab_size` leaves no room for an alphabet.
    """
    from tokenizers import Tokenizer, models, trainers

    backend = BertTokenizer().backend_tokenizer  # for its normalizer and pre-tokenizer
    texts = [backend.normalizer.normalize_str(text) for text in texts]
    counts = Counter(char for text in texts for char in text if not char.isspace())
    if not counts:
        raise VocabularyError("Training texts: expected some words, got none. Check the dataset's text columns.")
    room = vocab_size - len(SPECIAL_TOKENS)
    if room < 2:
        raise VocabularyError(f"vocab_size: expected at least {len(SPECIAL_TOKENS) + 2}, got {vocab_size}. Raise it.")

    # The trainer numbers "##a" in the order of a hash map, another one in each run: so do ties among the merges that
    # follow. Special tokens are numbered before it starts.
    by_frequency = sorted(counts, key=lambda char: (-counts[char], char))
    alphabet = sorted(by_frequency[: min(_MAX_ALPHABET, room // 2)])
    special = [*SPECIAL_TOKENS, *alphabet, *(f"##{char}" for char in alphabet)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, limit_alphabet=len(alphabet),
        show_progress=False,
    )  # fmt: skip
    scratch = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    scratch.pre_tokenizer = backend.pre_tokenizer
    scratch.train_from_iterator(texts, trainer)
    return BertTokenizer(vocab=scratch.get_vocab())


def load_vocab_tokenizer(vocab_file: str | Path) -> PreTrainedTokenizerFast:
    """Returns the tokenizer of a BERT ``vocab.txt``: one token a line, its id the line's number from 0.

    Raises:
        VocabularyError: If the file does not exist, lacks a special token or repeats a token.
    """
    path = Path(vocab_file)
    if not path.is_file():
        raise VocabularyError(f"{path}: expected a BERT vocab.txt, found no such file. Name one that exists.")
    tokens = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    vocab = {token: index for index, token in enumerate(tokens)}
    if missing := [token for token in SPECIAL_TOKENS if token not in vocab]:
        raise VocabularyError(
            f"{path}: expected one token a line with {', '.join(SPECIAL_TOKENS)} among them, "
            f"got {len(tokens)} lines without {', '.join(missing)}. Use a BERT vocab.txt."
        )
    for number, token in enumerate(tokens, start=1):
        if vocab[token] != number - 1:
            raise VocabularyError(f"{path}, line {number}: expected each token once, got {token!r} twice. Remove one.")
    cased = any(token != token.lower() for token in tokens if token not in SPECIAL_TOKENS)
    return BertTokenizer(vocab=vocab, do_lower_case=not cased)
