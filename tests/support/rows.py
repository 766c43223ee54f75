"""A data set of random rows, arguments of a short run, and what it logs: for the tests that train under a trainer."""

import torch
from transformers import TrainingArguments

from support.zoo import VOCAB


def arguments(folder, cls=TrainingArguments, **options):
    """Of a run on CPU: three steps of four rows, each of them logged, and nothing else told or saved."""
    fixed = dict(max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, seed=3, report_to=[])
    return cls(folder, **fixed | dict(use_cpu=True, disable_tqdm=True, save_strategy="no") | options)


def logged(trainer, *names):
    """What was logged with each loss, by these names; the losses themselves, if there are none."""
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [tuple(entry[name] for name in names) if names else entry["loss"] for entry in entries]


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
