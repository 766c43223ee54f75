"""One line after the first step, by every door, in words and sizes that an independent count confirms."""

import contextlib
import copy
import io
import logging
import os
import re
import subprocess
import sys

import pytest
import torch
import tqdm
import transformers
from peft import LoraConfig, get_peft_model
from torch.nn.modules import module as global_hooks
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

import hf_memsave
from hf_memsave import logs, measure_kept, patch, report, unpatch
from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.config.sizes import bytes_of
from hf_memsave.patching import first_step
from hf_memsave.patching.first_step import FIRST, LEDGER
from hf_memsave.tape.kinds import WORDS
from hf_memsave.tape.ledger import Ledger
from support.helpers import on_cpu_alone
from support.zoo import Size, batch_for, build

on_cpu = on_cpu_alone("this count of bytes")
SIZE = Size(hidden=64, layers=2, batch=4, seq=64)
FIXED = {"max_steps": 2, "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
LORA = LoraConfig(lora_dropout=0.1, target_modules="all-linear")
STOCK = {"activation_checkpointing": False}
_SIZE = r"([\d.]+ [KM]iB)"


@pytest.fixture(scope="module")
def folder(saved):
    return str(saved(SIZE))


@pytest.fixture
def lines(caplog):
    return lambda: [r.getMessage() for r in caplog.records if r.name == "hf_memsave" and "the first step" in r.message]


def sizes(line):
    """Bytes that are kept and that stock would keep, each time that a line says so."""
    return [tuple(map(bytes_of, found)) for found in re.findall(
        rf"keeps (?:about )?{_SIZE}.*? where stock would keep {_SIZE}", line
    )]  # fmt: skip


def check(line, model, batch, **options):
    """That ``line`` speaks of what is kept, in people's words, and of what is."""
    report = hf_memsave.patch(model)
    assert report.step.is_counted and line.split(" More: ")[0].removeprefix("hf_memsave: ") in " ".join(
        text.strip() for text in str(report).splitlines()
    )
    kept = measure_kept(model, batch, **options).total
    unpatch(model)
    stock = measure_kept(model, batch, **options).total
    assert kept < 0.8 * stock
    assert sizes(line)[-1] == (pytest.approx(kept, rel=0.02), pytest.approx(stock, rel=0.02))
    (freed,) = re.findall(r"([\d]+)% freed \(([^;)]*)", line)
    assert float(freed[0]) == pytest.approx(100 * (1 - kept / stock), abs=2)
    names, found = zip(*(re.fullmatch(rf"(.*) {_SIZE}", part).groups() for part in freed[1].split(", ")), strict=True)
    assert set(names) <= set(WORDS.values()) and line.endswith("More: print(hf_memsave.report(model))")
    assert sum(map(bytes_of, found)) == pytest.approx(stock - kept, rel=0.1)


@pytest.mark.parametrize("door", ["from_pretrained", "argument", "callback"])
def test_the_stock_trainer(door, folder, tmp_path, lines):
    model = LlamaForCausalLM.from_pretrained(folder, **({"memsave": True} if door == "from_pretrained" else {}))
    arguments = TrainingArguments(str(tmp_path), per_device_train_batch_size=SIZE.batch, **FIXED)
    rows = [dict(batch_for(model, Size(batch=1, seq=SIZE.seq), seed=i)) for i in range(8)]
    rows = [{name: x[0] for name, x in row.items()} for row in rows]
    callbacks = [hf_memsave.MemSaveCallback()] if door == "callback" else []
    options = {"memsave": True} if door == "argument" else {}
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=callbacks, **options)
    assert lines() == []
    trainer.train()
    (line,) = lines()
    check(line, model, {name: torch.stack([row[name] for row in rows[:4]]) for name in rows[0]})


@pytest.mark.parametrize("checkpointing", [True, False])
def test_trl(checkpointing, folder, folder_with_tokenizer, tmp_path, lines):
    """Its default is gradient checkpointing: the line says so."""
    import datasets
    import trl

    arguments = trl.SFTConfig(
        str(tmp_path), per_device_train_batch_size=SIZE.batch, model_init_kwargs={"memsave": True},
        **FIXED | ({} if checkpointing else STOCK),
    )  # fmt: skip
    rows = {"input_ids": batch_for(build("llama"), Size(batch=8, seq=SIZE.seq))["input_ids"].tolist()}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder_with_tokenizer)
    dataset = datasets.Dataset.from_dict(rows)
    trainer = trl.SFTTrainer(folder, arguments, train_dataset=dataset, processing_class=tokenizer)
    trainer.train()
    (line,) = lines()
    model, batch = trainer.model, next(iter(trainer.get_train_dataloader()))
    forward = lambda **inputs: trainer.compute_loss(model, dict(inputs))  # noqa: E731
    if checkpointing:
        assert line.startswith("hf_memsave: gradient checkpointing is on: ") and '"block"' not in line
        assert sizes(line)[0][0] == pytest.approx(measure_kept(model, batch, forward=forward).total, rel=0.02)
        assert str(report(model)).count("gradient checkpointing is on") == str(report(model)).count('"block"') == 1
    else:
        check(line, model, batch, forward=forward)


@pytest.mark.parametrize("kind", ["every second layer", "selective"])
def test_trainers_checkpointing_of_some(kind, folder, folder_with_tokenizer, tmp_path, lines):
    """Every second layer by Transformers' trainer, and TRL's selective one: weights have stock's bits, figures true."""
    import datasets
    import trl

    options = {"selective": True} if kind == "selective" else {"every_n_layers": 2}
    fixed = FIXED | {"per_device_train_batch_size": SIZE.batch, "gradient_checkpointing_kwargs": options}
    ids = batch_for(build("llama"), Size(batch=8, seq=SIZE.seq))["input_ids"].tolist()
    weights, measured = [], []
    for memsave in (False, True):
        model = LlamaForCausalLM.from_pretrained(folder).train()
        if kind == "selective":
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder_with_tokenizer)
            arguments, rows = trl.SFTConfig(str(tmp_path), **fixed), datasets.Dataset.from_dict({"input_ids": ids})
            more = {"processing_class": tokenizer, "memsave": memsave}
            trainer = trl.SFTTrainer(model, arguments, train_dataset=rows, **more)
        else:
            arguments = TrainingArguments(str(tmp_path), gradient_checkpointing=True, **fixed)
            rows = [{"input_ids": torch.tensor(row), "labels": torch.tensor(row)} for row in ids]
            trainer = Trainer(model, arguments, train_dataset=rows, memsave=memsave)
        trainer.train()
        weights.append(copy.deepcopy(model.state_dict()))
        forward = lambda trainer=trainer, model=model, **inputs: trainer.compute_loss(model, dict(inputs))  # noqa: E731
        measured.append(measure_kept(model, next(iter(trainer.get_train_dataloader())), forward=forward).total)
    assert all(torch.equal(weights[0][name], x) for name, x in weights[1].items())
    (line,) = lines()
    assert line.startswith("hf_memsave: gradient checkpointing is on: the first step keeps ")
    assert sizes(line) == [(pytest.approx(measured[1], rel=0.02), pytest.approx(measured[0], rel=0.02))]
    assert ("more is kept" in str(report(model))) == (kind != "selective")


@pytest.mark.parametrize("door", ["plain", "lora", "offload", "gate", "bf16"])
def test_a_plain_loop(door, folder, lines):
    config = {"offload": {"offload": True}, "gate": {"checkpoint": "gate"}}.get(door, True)
    model = LlamaForCausalLM.from_pretrained(folder, memsave=config)
    if door == "lora":
        model = get_peft_model(model, LORA)
    model.train()
    batch = batch_for(model, SIZE)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=door == "bf16"):
            loss = model(**batch).loss
        loss.backward()
    (line,) = lines()
    assert ("adapters' inputs" in line) == (door == "lora") and ("run again" in line) == (door == "gate")
    if door in ("offload", "gate"):
        step = patch(model, config).step
        ours = measure_kept(model, batch).total
        unpatch(model)
        stock = measure_kept(model, batch).total
        assert sizes(line) == [(pytest.approx(step.nbytes_kept, rel=0.02), pytest.approx(stock, rel=0.02))]
        assert step.nbytes_kept + step.nbytes_offloaded == pytest.approx(ours, rel=0.02)
        away = [bytes_of(n) for n in re.findall(rf"and {_SIZE} in main memory", line)]
        assert away == [pytest.approx(step.nbytes_offloaded, rel=0.02)] * (door == "offload")
    else:
        with torch.autocast("cpu", torch.bfloat16, enabled=door == "bf16"):
            check(line, model, batch)


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointing_that_the_caller_has_turned_on(is_reentrant, folder, lines):
    """With adapters; the line comes once, and also where no backward follows some forward."""
    model = get_peft_model(LlamaForCausalLM.from_pretrained(folder, memsave=True), LORA).train()
    enable_checkpointing(model, use_reentrant=is_reentrant)
    model.enable_input_require_grads()
    batch = batch_for(model, SIZE)
    model(**batch)
    for _ in range(3):
        model(**batch).loss.backward()
    (line,) = lines()
    assert not any(LEDGER in module.__dict__ for module in model.modules())
    kept = measure_kept(model, batch).total
    assert line.startswith("hf_memsave: gradient checkpointing is on: ") and "no block runs twice" in str(report(model))
    assert bytes_of(re.search(rf"keeps {_SIZE}", line)[1]) == pytest.approx(kept, rel=0.02)


def test_a_loop_that_forgot_train_is_told_once(lines, caplog):
    """And the first step in training mode is still counted."""
    model = build("llama").eval()
    made, batch = patch(model, "block"), batch_for(model)
    for _ in range(2):
        model(**batch).loss.backward()
    (line,) = caplog.messages
    assert line.startswith("the model is in eval mode: dropout is off, and no block runs again.")
    assert made.step.is_counted and "blocks run again" not in str(made)
    with torch.no_grad():
        model(**batch)
    model.train()
    model(**batch).loss.backward()
    assert len(lines()) == 1 and "blocks run again" in lines()[0] and made.step.is_counted


@pytest.mark.parametrize("alone", [False, True])
def test_where_a_kv_cache_is_asked_for_no_block_runs_again_and_that_is_told(alone, caplog):
    model = build("llama").train()
    made, batch = patch(model.model.layers[1] if alone else model, "block"), batch_for(model)
    model(**batch, use_cache=True).loss.backward()
    assert caplog.text.count('checkpoint="block" ran no block of') == 1 and "use_cache=False asks" in caplog.text
    assert "blocks run again" not in str(made)
    other = build("llama").train()
    again = patch(other, "block")
    other(**batch, use_cache=False).loss.backward()
    assert "blocks run again" in str(again) and (alone or again.step.nbytes_kept < made.step.nbytes_kept)
    assert caplog.text.count("ran no block") == 1


def test_a_measurement_before_training_is_not_taken_for_the_first_step(lines):
    model = build("llama").train()
    report = patch(model)
    longest = measure_kept(model, batch_for(model, SIZE)).total
    assert lines() == [] and report.step.nbytes_kept == pytest.approx(longest, rel=0.02)
    batch = {name: x[:1] for name, x in batch_for(model, SIZE).items()}
    model(**batch).loss.backward()
    assert len(lines()) == 1 and report.step.nbytes_kept == pytest.approx(measure_kept(model, batch).total, rel=0.02)
    assert report.step.nbytes_kept < 0.9 * longest


@pytest.mark.parametrize("rung", ["gate", "block"])
def test_a_rung_under_checkpointing_is_not_advised_again(rung, folder, lines):
    model = LlamaForCausalLM.from_pretrained(folder, memsave=rung).train()
    enable_checkpointing(model)
    model(**batch_for(model, SIZE)).loss.backward()
    said = str(report(model))
    assert len(lines()) == 1 and '"block"' not in lines()[0]
    assert '"gate"' not in said and '"block"' in said and ("no block runs twice" in said) == (rung == "gate")


def test_later_steps_are_those_of_a_model_that_counts_nothing(folder, monkeypatch):
    """No hook, no ledger, and as many calls of Python functions, but to ask which parameters are trained."""

    def calls(model):
        found = []
        for _ in range(4):
            batch, count = batch_for(model, SIZE), 0

            def count_call(frame, event, arg):
                nonlocal count
                count += event == "call" and frame.f_code.co_filename not in (first_step.__file__, logs.__file__)

            sys.setprofile(count_call)
            model(**batch).loss.backward()
            sys.setprofile(None)
            found.append(count)
        return found

    counting, silent = (LlamaForCausalLM.from_pretrained(folder, memsave=True).train() for _ in range(2))
    del silent.__dict__[LEDGER]
    silent.__dict__[FIRST] = Ledger()
    first, *later = calls(counting)
    assert first > later[-1] and later == calls(silent)[1:] and not global_hooks._has_any_global_hook()
    monkeypatch.setattr(Ledger, "note", lambda *_: pytest.fail("it counts"))
    counting(**batch_for(counting, SIZE)).loss.backward()


def test_a_model_that_trains_other_parameters_is_counted_again(folder, lines):
    model = LlamaForCausalLM.from_pretrained(folder, memsave=True).train().requires_grad_(False)
    report, batch = patch(model), batch_for(model, SIZE)
    model(**batch)
    assert lines() == [] and "keeps nothing for backward" in str(report)
    for layers, count in ((model.model.layers[1:], 1), (model, 2), (model.model.embed_tokens, 2)):
        layers.requires_grad_(True)
        for _ in range(2):
            model.eval()(**batch)
            model.train()(**batch).loss.backward()
        assert len(lines()) == count and "the first step that trains other parameters keeps" in lines()[-1]
        check(lines()[-1], copy.deepcopy(model), batch)
    assert patch(model).step is report.step
    model = get_peft_model(model, LORA)
    model(**batch).loss.backward()
    assert "adapters' inputs" in lines()[2]


def test_what_is_frozen_in_turns_is_counted_a_few_times(folder, lines, monkeypatch):
    model, counts = LlamaForCausalLM.from_pretrained(folder, memsave=True).train(), []
    close = Ledger.close
    monkeypatch.setattr(Ledger, "close", lambda *args: (counts.append(1), close(*args)))
    batch, parameters = batch_for(model, SIZE), list(model.parameters())
    for i in range(24):
        parameters[i % 12].requires_grad_(i >= 12)
        model(**batch).loss.backward()
    assert 1 < len(lines()) <= len(counts) < 10


class Own(transformers.modeling_layers.GradientCheckpointingLayer):
    def __init__(self):
        super().__init__()
        self.one, self.other, self.norm = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32), torch.nn.LayerNorm(32)

    def forward(self, x):
        return x + self.other(torch.nn.functional.silu(self.one(self.norm(x))))


def test_a_rung_that_the_model_has_no_linears_for_is_not_advised(lines):
    model = torch.nn.Sequential(Own(), Own()).train()
    for block in model:
        block.gradient_checkpointing = True
        block._gradient_checkpointing_func = lambda f, *args: checkpoint(f, *args, use_reentrant=False)
    patch(model)
    model(torch.randn(64, 32, requires_grad=True)).sum().backward()
    (line,) = lines()
    assert '"gate"' not in line
    model.train(False)
    patch(model, "block", replace=True)


TOLD = {"not at all": 1, "by Transformers": 0, "by Python": 0, "by a null handler": 1, "by a file": 1}


@pytest.mark.parametrize(("told", "count"), [*TOLD.items(), ("by basicConfig", 1)])
def test_it_is_said_once_without_handlers_and_with_and_not_where_it_is_told_to_be_quiet(told, count, monkeypatch):
    logger, root = logging.getLogger("hf_memsave"), logging.getLogger()
    monkeypatch.setattr(logger, "handlers", logger.handlers[:])
    monkeypatch.setattr(root, "handlers", [])  # pytest's
    with contextlib.redirect_stderr(io.StringIO()) as written:
        {
            "not at all": lambda: None,
            "by Transformers": transformers.logging.set_verbosity_error,
            "by Python": lambda: logger.setLevel("WARNING"),
            "by a null handler": lambda: logger.addHandler(logging.NullHandler()),
            "by a file": lambda: root.addHandler(logging.FileHandler(os.devnull)),
            "by basicConfig": logging.basicConfig,
        }[told]()
        model = build("llama")
        patch(model)
        for _ in tqdm.tqdm(range(2)):
            model(**batch_for(model)).loss.backward()
    text = written.getvalue()
    begins = "INFO:hf_memsave:" if told == "by basicConfig" else r"\r *\r"
    assert text.count("the first step keeps") == len(re.findall(rf"{begins}hf_memsave: the first step", text)) == count


def test_a_variable_sets_the_level_and_a_level_set_before_stays():
    code = "import sys, logging\nlogging.getLogger('hf_memsave').setLevel({before})\nimport hf_memsave\n"
    code += "print(logging.getLogger('hf_memsave').level, 'torch' in sys.modules)\n"
    code += "logging.getLogger('hf_memsave').info('hello')"
    levels = ("", 0, 20), ("error", 0, 40), ("Debug", 0, 10), ("", 30, 30), ("loud", 0, 20)
    for value, before, level, rank in (*((*each, 0) for each in levels), ("", 0, 20, 1)):
        done = subprocess.run(
            [sys.executable, "-c", code.format(before=before)], capture_output=True, text=True, check=True,
            env={**os.environ, "HF_MEMSAVE_VERBOSITY": value, "RANK": str(rank)},
        )  # fmt: skip
        assert done.stdout.split() == [str(level), "False"]
        assert ("expected one of debug, info, warning" in done.stderr) == (value == "loud")
        assert ("hf_memsave: hello" in done.stderr) == (level <= 20 and not rank)


def test_a_copy_a_repeated_patch_and_another_patch(folder, lines):
    model = LlamaForCausalLM.from_pretrained(folder, memsave=True).train()
    other, batch = copy.deepcopy(model), batch_for(model, SIZE)
    model(**batch).loss.backward()
    step = patch(model).step
    assert step.is_counted and patch(copy.deepcopy(model)).step.nbytes_kept == step.nbytes_kept
    assert not patch(other).step.is_counted
    patch(model).compare(batch)
    assert patch(model).step is step and len(lines()) == 1
    report = patch(model, {"norm": "stock"}, replace=True)
    assert not report.step.is_counted and "counted in the first training step" in str(report)
    model(**batch).loss.backward()
    assert len(lines()) == 2 and report.step.is_counted
    model.eval()(**batch).loss.backward()
    patch(other).undo()
    patch(other.eval())
    other(**batch).loss.backward()
    assert len(lines()) == 2, "in eval mode nothing is said"
