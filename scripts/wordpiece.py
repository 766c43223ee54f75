"""BERT's WordPiece tokenizer without a hub, trained on given texts."""

from collections import Counter
from collections.abc import Iterable

from tokenizers import Tokenizer, models, trainers
from transformers import BertTokenizer, PreTrainedTokenizerFast

from arguments import UsageError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_MAX_ALPHABET = 1000


def train_wordpiece(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Returns a lower-casing tokenizer with BERT's special tokens; equal texts give equal ids in every process.

    Raises:
        UsageError: If there is no text, or `vocab_size` leaves no room for an alphabet.
    """
    backend = BertTokenizer().backend_tokenizer  # for its normalizer and pre-tokenizer
    texts = [backend.normalizer.normalize_str(text) for text in texts]
    counts = Counter(char for text in texts for char in text if not char.isspace())
    if not counts:
        raise UsageError("Training texts: expected some words, got none. Check the dataset's text columns.")
    room = vocab_size - len(SPECIAL_TOKENS)
    if room < 2:
        raise UsageError(f"vocab_size: expected at least {len(SPECIAL_TOKENS) + 2}, got {vocab_size}. Raise it.")

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
