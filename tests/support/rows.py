"""A data set of random rows, for the tests that train under a trainer."""

import torch

from support.zoo import VOCAB


class Rows(list):
    """Token ids, a mask, labels, and a column that no forward takes."""

    def __init__(self, family, tokens=12):
        generator = torch.Generator().manual_seed(0)
        for number in range(24):
            ids = torch.randint(5, VOCAB, (tokens,), generator=generator)
            mask = torch.ones_like(ids)
            if number % 3 == 0:
                mask[tokens * 3 // 4 :] = 0
            label = torch.tensor(number % 2) if family == "bert" else ids.clone()
            self.append({"input_ids": ids, "attention_mask": mask, "labels": label, "text_length": tokens})
