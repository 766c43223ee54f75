"""What these tests share: saved models, to be loaded quantized or by TRL, which wants a tokenizer beside them."""

import functools

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support.zoo import VOCAB, Size, build


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves a stock model, once a module, and gives its folder."""

    @functools.cache
    def save(size=None, family="llama"):
        folder = tmp_path_factory.mktemp("base")
        build(family, size or Size()).save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def folder_with_tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build("llama", Size(hidden=16, heads=2, layers=1)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2", unk_token="w1")
    tokenizer.save_pretrained(folder)
    return str(folder)
