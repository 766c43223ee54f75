"""Sampled linears under real trainers: checkpoints, resuming, the column of sample indices, processes side by side."""

import json
import os
import socket

import pytest
import torch
import torch.multiprocessing as mp
from datasets import Dataset
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

from hf_memsave import WTACRS, ConfigError, MemSaveCallback, MemSaveConfig, patch
from hf_memsave.integrations import trainer as callbacks
from hf_memsave.integrations.norms import NORMS_NAME, load_norms, save_norms
from hf_memsave.patching.sampled_layers import sampler_of
from support.families import VOCAB, Size, build
from support.helpers import assert_same_bits

SIZE = Size(batch=4, seq=24)
#: By their numbers: linears that no target names are exact where sampling frees nothing.
BLOCKS = ("0", "1")
SAMPLES = 32
OUTPUT = "bert.encoder.layer.0.output.dense"


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
    WTACRS(targets=BLOCKS, cache=None),
]


@pytest.mark.parametrize("sampled", CACHES, ids=lambda c: str(c.cache))
def test_a_resumed_run_ends_with_the_bits_of_one_never_stopped(tmp_path, sampled):
    whole = trainer(tmp_path / "whole", sampled)
    whole.train()
    first = trainer(tmp_path / "first", sampled, save_total_limit=2)
    first.train()
    checkpoint = str(tmp_path / "first" / "checkpoint-4")
    has_table = sampled.cache in ("sample_idx", "content")
    again = trainer(tmp_path / "again", sampled, resume_from=checkpoint if has_table else None)
    again.train(resume_from_checkpoint=checkpoint)
    for (name, mine), (_, expected) in zip(again.model.named_parameters(), whole.model.named_parameters(), strict=True):
        assert_same_bits(mine, expected, name)
    assert sampler_of(again.model).step == 8


def test_a_run_that_resumes_without_the_norms_ends_elsewhere(tmp_path):
    # The test above would pass without any norms if they did not matter.
    first = trainer(tmp_path / "first", WTACRS(targets=BLOCKS))
    first.train()
    state = tmp_path / "first" / "checkpoint-4" / "trainer_state.json"
    saved = json.loads(state.read_text())
    assert saved["stateful_callbacks"].pop("MemSaveCallback")["attributes"]["norms"]
    state.write_text(json.dumps(saved))
    again = trainer(tmp_path / "again", WTACRS(targets=BLOCKS))
    again.train(resume_from_checkpoint=str(state.parent))
    assert any(not torch.equal(a, b) for a, b in zip(again.model.parameters(), first.model.parameters(), strict=True))
    saved = json.loads((tmp_path / "again" / "checkpoint-8" / state.name).read_text())
    assert saved["stateful_callbacks"]["MemSaveCallback"]["attributes"]["norms"]


def test_a_run_that_resumes_without_its_table_is_told_so(tmp_path, monkeypatch):
    first = trainer(tmp_path / "first", CACHES[1])
    first.train()
    said = []
    monkeypatch.setattr(callbacks.logger, "warning", said.append)
    again = trainer(tmp_path / "again", CACHES[1])
    again.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-4"))
    assert len(said) == 1 and "resume_from=" in said[0]
    assert sampler_of(again.model).step == 8
    missing = trainer(tmp_path / "missing", CACHES[1], resume_from=tmp_path)
    with pytest.raises(ConfigError, match="expected a checkpoint with memsave_norms.safetensors, found none"):
        missing.train()


def test_a_callback_restored_by_the_trainer_is_the_one_that_was_saved(tmp_path):
    first = trainer(tmp_path / "first", WTACRS(targets=BLOCKS))
    first.train()
    again = trainer(tmp_path / "again", WTACRS(targets=BLOCKS), restore_callback_states_from_checkpoint=True)
    again.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-4"))
    for mine, expected in zip(again.model.parameters(), first.model.parameters(), strict=True):
        assert_same_bits(mine, expected)
    restored = next(c for c in again.callback_handler.callbacks if isinstance(c, MemSaveCallback))
    assert restored.config == MemSaveConfig(linear=WTACRS(targets=BLOCKS))


def test_a_checkpoint_has_the_table_beside_stocks_files(tmp_path):
    run = trainer(tmp_path, CACHES[1])
    run.train()
    saved = load_file(tmp_path / "checkpoint-8" / NORMS_NAME)
    assert int(saved["step"]) == 8
    assert len(saved["bert.encoder.layer.0.attention.self.query/start"]) == SIZE.seq
    stock = Trainer(build("bert", SIZE), run.args, train_dataset=dataset(with_index=False))
    stock.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert stock.state.global_step == 8


def test_an_exact_run_saves_no_norms(tmp_path):
    run = trainer(tmp_path, None, steps=4)
    run.train()
    assert not (tmp_path / "checkpoint-4" / NORMS_NAME).exists()


def test_every_sample_is_remembered_by_its_column(tmp_path):
    run = trainer(tmp_path, CACHES[1])
    run.train()
    codes = sampler_of(run.model).state_dict()[f"{OUTPUT}/samples"]
    assert len(codes) == SAMPLES
    assert (codes > 0).all()


def test_a_dataset_without_the_column_is_refused(tmp_path):
    run = trainer(tmp_path, CACHES[1], dataset(with_index=False))
    with pytest.raises(ConfigError, match=r"expected the batch's column 'sample_idx'.*got NoneType.*add_column"):
        run.train()


def test_an_index_out_of_range_is_refused(tmp_path):
    run = trainer(tmp_path, WTACRS(targets=BLOCKS, cache="sample_idx", samples=SAMPLES - 1), steps=20)
    with pytest.raises(ConfigError, match=r"sample_idx: expected numbers from 0 to 30, got .* to 31"):
        run.train()


def test_evaluation_needs_no_column(tmp_path):
    run = trainer(tmp_path, CACHES[1], steps=2)
    run.train()
    assert run.evaluate(dataset(with_index=False))["eval_loss"] > 0
    assert run.evaluate(dataset())["eval_loss"] > 0


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


def work(rank, folder):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    run = trainer(folder, CACHES[1], steps=4, ddp_backend="gloo")
    run.train()
    seen = sampler_of(run.model).state_dict()[f"{OUTPUT}/samples"] > 0
    torch.save(seen, folder / f"{rank}.pt")


@pytest.mark.long
def test_a_checkpoint_of_two_processes_gathers_what_each_has_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    mp.spawn(work, (tmp_path,), nprocs=2)
    saved = load_file(tmp_path / "checkpoint-4" / NORMS_NAME)[f"{OUTPUT}/samples"] > 0
    mine = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert [int(seen.sum()) for seen in mine] == [SAMPLES // 2, SAMPLES // 2]
    assert torch.equal(saved, mine[0] | mine[1])
    assert saved.all()
