"""Sampled linears under real trainers: checkpoints, resuming, the column of sample indices, processes side by side."""

import pytest
import torch
from datasets import Dataset
from transformers import Trainer

from hf_memsave import WTACRS, ConfigError, MemSaveCallback, MemSaveConfig
from hf_memsave.patching.sampled_layers import sampler_of
from support.helpers import assert_same_bits
from support.rows import arguments
from support.zoo import VOCAB, Size, build

SIZE = Size(batch=4, seq=24)
#: By their numbers: linears that no target names are exact where sampling frees nothing.
BLOCKS = ("0", "1")
SAMPLES = 32


def dataset(samples=SAMPLES, with_index=True):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, VOCAB, (samples, SIZE.seq), generator=generator).tolist()
    labels = [i % 2 for i in range(samples)]
    columns = {"input_ids": ids, "attention_mask": [[1] * SIZE.seq] * samples, "labels": labels}
    return Dataset.from_dict(columns | ({"sample_idx": list(range(samples))} if with_index else {}))


def trainer(folder, sampled, data=None, steps=8, **options):
    options |= dict(use_cpu=not torch.cuda.is_available(), save_strategy="steps", save_steps=4)
    args = arguments(folder, max_steps=steps, **options)
    callback = MemSaveCallback(MemSaveConfig(linear=sampled))
    return Trainer(build("bert", SIZE), args, train_dataset=data or dataset(), callbacks=[callback])


INDEXED = WTACRS(targets=BLOCKS, cache="sample_idx", samples=SAMPLES)


@pytest.mark.parametrize("restores", [False, True])
def test_a_resumed_run_ends_with_the_bits_of_one_never_stopped(tmp_path, restores):
    """Also where the trainer restores its callbacks."""
    sampled = WTACRS(targets=BLOCKS)
    whole = trainer(tmp_path / "whole", sampled)
    whole.train()
    again = trainer(tmp_path / "again", sampled, restore_callback_states_from_checkpoint=restores)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    for (name, mine), (_, expected) in zip(again.model.named_parameters(), whole.model.named_parameters(), strict=True):
        assert_same_bits(mine, expected, name)
    assert sampler_of(again.model).step == 8
    restored = next(c for c in again.callback_handler.callbacks if isinstance(c, MemSaveCallback))
    assert restored.config == MemSaveConfig(linear=sampled)


def test_a_table_of_samples_starts_over_where_a_run_resumes_and_stock_takes_up_its_checkpoint(tmp_path):
    first = trainer(tmp_path / "first", INDEXED)
    first.train()
    checkpoint = str(tmp_path / "first" / "checkpoint-4")
    stock = Trainer(build("bert", SIZE), first.args, train_dataset=dataset(with_index=False))
    assert first.evaluate(stock.train_dataset)["eval_loss"] > 0, "evaluation needs no column"
    stock.train(resume_from_checkpoint=checkpoint)
    assert stock.state.global_step == 8
    again = trainer(tmp_path / "again", INDEXED)
    again.train(resume_from_checkpoint=checkpoint)
    assert sampler_of(again.model).step == 8
    seen, of_first = (sampler_of(run.model).cache.layers["bert.encoder.layer.0.output.dense"] for run in (again, first))
    assert int((seen.samples > 0).sum()) == 4 * SIZE.batch < int((of_first.samples > 0).sum())


def test_a_dataset_without_the_column_and_an_index_out_of_range_are_refused(tmp_path):
    run = trainer(tmp_path, INDEXED, dataset(with_index=False))
    with pytest.raises(ConfigError, match=r"expected the batch's column 'sample_idx'.*got NoneType.*add_column"):
        run.train()
    run = trainer(tmp_path, WTACRS(targets=BLOCKS, cache="sample_idx", samples=SAMPLES - 1), steps=20)
    with pytest.raises(ConfigError, match=r"sample_idx: expected numbers from 0 to 30, got .* to 31"):
        run.train()
