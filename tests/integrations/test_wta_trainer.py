"""Sampled linears under real trainers: checkpoints, resuming, the column of sample indices, processes side by side."""


import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from hf_memsave import WTACRS, ConfigError, MemSaveCallback, MemSaveConfig, patch
from hf_memsave.integrations.trainer import NORMS_NAME, load_norms, save_norms
from hf_memsave.patching.sampled_layers import sampler_of
from support.families import VOCAB, Size, build
from support.helpers import assert_same_bits

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


def trainer(folder, sampled, data=None, steps=8, resume_from=None, **options):
    args = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=SIZE.batch, max_steps=steps, logging_steps=1, save_steps=4,
        report_to="none", use_cpu=not torch.cuda.is_available(), disable_tqdm=True, **options,
    )  # fmt: skip
    config = MemSaveConfig(linear=sampled)
    callback = MemSaveCallback(config, resume_from=resume_from)
    return Trainer(build("bert", SIZE), args, train_dataset=data or dataset(), callbacks=[callback])


CACHES = [
    WTACRS(targets=BLOCKS),
    WTACRS(targets=BLOCKS, cache="sample_idx", samples=SAMPLES),
    WTACRS(targets=BLOCKS, cache="content", samples=64),
]


@pytest.mark.parametrize(("sampled", "restores"), [*((c, False) for c in CACHES), (CACHES[0], True)], ids=str)
def test_a_resumed_run_ends_with_the_bits_of_one_never_stopped(tmp_path, sampled, restores):
    """Also where the trainer restores its callbacks."""
    whole = trainer(tmp_path / "whole", sampled)
    whole.train()
    checkpoint = str(tmp_path / "whole" / "checkpoint-4")
    resume_from = None if sampled.cache == "position" else checkpoint
    again = trainer(
        tmp_path / "again", sampled, resume_from=resume_from, restore_callback_states_from_checkpoint=restores
    )
    again.train(resume_from_checkpoint=checkpoint)
    for (name, mine), (_, expected) in zip(again.model.named_parameters(), whole.model.named_parameters(), strict=True):
        assert_same_bits(mine, expected, name)
    assert sampler_of(again.model).step == 8
    restored = next(c for c in again.callback_handler.callbacks if isinstance(c, MemSaveCallback))
    assert restored.config == MemSaveConfig(linear=sampled)


def test_a_checkpoint_has_the_table_beside_stocks_files_and_a_run_that_resumes_without_is_told_so(
    tmp_path, caplog
):
    first = trainer(tmp_path / "first", CACHES[1])
    first.train()
    saved = load_file(tmp_path / "first" / "checkpoint-8" / NORMS_NAME)
    assert int(saved["step"]) == 8
    assert len(saved["bert.encoder.layer.0.attention.self.query/start"]) == SIZE.seq
    stock = Trainer(build("bert", SIZE), first.args, train_dataset=dataset(with_index=False))
    assert first.evaluate(stock.train_dataset)["eval_loss"] > 0, "evaluation needs no column"
    stock.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-8"))
    assert stock.state.global_step == 8
    caplog.clear()
    again = trainer(tmp_path / "again", CACHES[1])
    again.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-4"))
    assert [r.levelname for r in caplog.records if "resume_from=" in r.getMessage()] == ["WARNING"]
    assert sampler_of(again.model).step == 8
    missing = trainer(tmp_path / "missing", CACHES[1], resume_from=tmp_path)
    with pytest.raises(ConfigError, match="expected a checkpoint with memsave_norms.safetensors, found none"):
        missing.train()


def test_a_dataset_without_the_column_and_an_index_out_of_range_are_refused(tmp_path):
    run = trainer(tmp_path, CACHES[1], dataset(with_index=False))
    with pytest.raises(ConfigError, match=r"expected the batch's column 'sample_idx'.*got NoneType.*add_column"):
        run.train()
    run = trainer(tmp_path, WTACRS(targets=BLOCKS, cache="sample_idx", samples=SAMPLES - 1), steps=20)
    with pytest.raises(ConfigError, match=r"sample_idx: expected numbers from 0 to 30, got .* to 31"):
        run.train()


def test_norms_of_a_loop_of_ones_own(tmp_path):
    models = []
    for _ in range(2):
        models.append(build("bert", SIZE))
        patch(models[-1], "wta-crs")
    batch = {k: torch.tensor(v) for k, v in dataset(4, with_index=False).to_dict().items()}
    models[0](**batch).loss.backward()
    save_norms(models[0], tmp_path / "here")
    load_norms(models[1], tmp_path / "here")
    mine, other = (sampler_of(m).state_dict() for m in models)
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)
