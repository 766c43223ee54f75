"""A byte-level BPE tokenizer trained on given texts, for a model with random weights and no hub."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from arguments import UsageError

#: Padding is 0, as T5 has it. Every byte is a token, so there is no unknown one.
SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}


def train_byte_bpe(texts: Iterable[str], vocab_size: int, ends_texts: bool = False) -> PreTrainedTokenizerBase:
    """Train a tokenizer that gives every text back unchanged; the same texts give the same ids in every process.

    Of at most ``vocab_size`` tokens, the special ones and the 256 bytes included; one that ``ends_texts`` adds
    ``</s>``, as encoder-decoders expect.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fewest = len(alphabet) + len(SPECIAL_TOKENS)
    if vocab_size < fewest:
        raise UsageError(
            f"the configuration's vocab_size: expected at least {fewest}, for 256 bytes and {len(SPECIAL_TOKENS)} "
            f"special tokens, got {vocab_size}. Raise it with --config_overrides, or give --tokenizer_name."
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    if ends_texts:
        end = SPECIAL_TOKENS["eos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, backend.token_to_id(end))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **SPECIAL_TOKENS,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
