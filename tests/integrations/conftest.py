"""What the tests of adapters share: saved bases, for those who load them quantized."""

import pytest
import torch

from support.families import build


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves a model of a size, once a module, and gives its folder."""
    folders = {}

    def save(size, family="llama"):
        if (size, family) not in folders:
            folders[size, family] = tmp_path_factory.mktemp("base")
            build(family, size, torch.bfloat16).save_pretrained(folders[size, family])
        return folders[size, family]

    return save
