"""TRL's trainers take ``memsave=``, their YAML files ``model_init_kwargs: {memsave: true}``; both keep as little."""

import random

import datasets
import pytest
import torch
import trl
import yaml
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_memsave import ConfigError, MemSaveCallback, MemSaveConfig, measure_kept, patch
from hf_memsave.count.peak import count_peak
from hf_memsave.ops.loss import chunked_loss
from hf_memsave.patching.swap import is_patched, patch_of
from support.zoo import VOCAB

FIXED = {"max_steps": 1, "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
ROWS = {
    "SFT": {"input_ids": [[3, 4, 5, 6]] * 8},
    "Reward": {"chosen": ["w3 w4"] * 8, "rejected": ["w3 w5"] * 8},
    "DPO": {"prompt": ["w3"] * 8, "chosen": ["w4 w5"] * 8, "rejected": ["w6 w7"] * 8},
}


@pytest.mark.parametrize(("choice", "is_asked"), [("true", True), ("false", False)])
def test_a_yaml_file_of_sft_config_patches_the_model(folder_with_tokenizer, tmp_path, choice, is_asked):
    file = tmp_path / "sft.yaml"
    options = {**FIXED, "output_dir": str(tmp_path / "out"), "model_init_kwargs": {"memsave": yaml.safe_load(choice)}}
    file.write_text(yaml.safe_dump(options), encoding="utf-8")
    (config,) = trl.TrlParser(trl.SFTConfig).parse_args_and_config(["--config", str(file)])
    trainer = trl.SFTTrainer(folder_with_tokenizer, config, train_dataset=datasets.Dataset.from_dict(ROWS["SFT"]))
    assert is_patched(trainer.model) == is_asked
    trainer.train()


@pytest.mark.parametrize("kind", ROWS)
def test_a_trainer_that_lists_its_arguments_takes_memsave(kind, folder_with_tokenizer, tmp_path):
    cls, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    args = config(str(tmp_path), logging_steps=1, **FIXED)
    peft_config = LoraConfig(target_modules=["q_proj", "v_proj"])
    options = dict(train_dataset=datasets.Dataset.from_dict(ROWS[kind]), peft_config=peft_config)
    with pytest.raises(ConfigError, match="unknown preset 'exakt'"):
        cls(folder_with_tokenizer, args=args, **options, memsave="exakt")
    trainer = cls(folder_with_tokenizer, args=args, **options, memsave={"checkpoint": "gate"})
    (callback,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, MemSaveCallback))
    assert callback.config == patch_of(trainer.model).config == MemSaveConfig(checkpoint="gate")
    trainer.train()
    assert trainer.state.log_history[0]["memsave/freed_fraction"] > 0


def kept_in_the_first_step(trainer):
    found, stock = [], trainer.compute_loss

    def compute_loss(model, inputs, *args, **kwargs):
        found.append(measure_kept(trainer.model, (model, inputs), forward=lambda *batch: stock(*batch)).total)
        return stock(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss
    loss = trainer.train().training_loss
    return found[0], loss


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_a_model_patched_as_it_is_loaded_keeps_what_one_patched_by_its_trainer_keeps(
    kind, folder_with_tokenizer, tmp_path
):
    """TRL puts a forward of its own over that of the model, as the trainer is made."""
    cls, config, kept = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config"), []
    for choices in ({"model_init_kwargs": {"memsave": True}}, {"memsave": True}, {}):
        memsave = choices.pop("memsave", None)
        args = config(str(tmp_path), activation_checkpointing=False, **choices, **FIXED)
        trainer = cls(
            folder_with_tokenizer, args=args, train_dataset=datasets.Dataset.from_dict(ROWS[kind]), memsave=memsave
        )
        if kind == "DPO":
            assert any(map(is_patched, trainer.ref_model.modules())) == ("model_init_kwargs" in choices)
        kept.append(kept_in_the_first_step(trainer))
    (by_loading, *losses), (by_trainer, loss), (stock, of_stock) = kept
    assert by_loading == by_trainer < 0.7 * stock and losses == [loss] == [of_stock]


def words(count):
    return [" ".join(f"w{random.randrange(3, VOCAB)}" for _ in range(count)) for _ in range(8)]


def trained(kind, folder, output, is_patched):
    """Losses and norms of gradients of two steps, and the higher peak."""
    random.seed(0)
    torch.manual_seed(0)
    rows, options, given = {"prompt": words(4), "chosen": words(20), "rejected": words(20)}, {}, {}
    if kind == "KTO":
        rows = {"prompt": rows["prompt"], "completion": rows["chosen"], "label": [True, False] * 4}
    if kind == "GRPO":
        rows = {"prompt": rows["prompt"]}
        options = dict(max_completion_length=8, num_generations=2, per_device_train_batch_size=2)
        given["reward_funcs"] = lambda completions, **_: [float(number) for number, _ in enumerate(completions)]
    model, home = folder, trl
    if kind == "ORPO":
        from trl.experimental import orpo as home

        model = AutoModelForCausalLM.from_pretrained(folder)
        given["processing_class"] = AutoTokenizer.from_pretrained(folder)
    options |= dict(FIXED, max_steps=2, logging_steps=1, learning_rate=0.01, activation_checkpointing=False)
    args = getattr(home, f"{kind}Config")(output, **options)
    trainer = getattr(home, f"{kind}Trainer")(model, args=args, train_dataset=datasets.Dataset.from_dict(rows), **given)
    if is_patched:
        patch(trainer.model)
    step, peaks, losses = trainer.training_step, [], []
    trainer.training_step = lambda *a: peaks.append(count_peak(lambda: losses.append(step(*a))).peak) or losses.pop()
    trainer.train()
    return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log], max(peaks)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "part"), [("DPO", 1.0), ("KTO", 1.0), ("GRPO", 1.0), ("ORPO", 0.25)])
def test_a_preference_loss_is_stocks_at_no_higher_a_peak(kind, part, folder_with_tokenizer, tmp_path, monkeypatch):
    """Those whose log-probabilities TRL computes in chunks of its own it goes on to; of logits it reads, we do."""
    monkeypatch.setattr(chunked_loss, "CHUNK", 2**18)
    stock, ours = (trained(kind, folder_with_tokenizer, str(tmp_path), is_patched) for is_patched in (False, True))
    torch.testing.assert_close(torch.tensor(ours[0]), torch.tensor(stock[0]), rtol=1e-5, atol=1e-6)
    assert ours[1] <= part * stock[1]


def kept_in_each_step(kind, folder, output, rung, is_generating):
    """Bytes that the model keeps in the loss of each step, by the setting in place then; and the losses."""
    if kind == "GKD":
        from trl.experimental import gkd as home
    else:
        home = trl
    args = dict(FIXED, max_steps=3, logging_steps=1, per_device_train_batch_size=2, activation_checkpointing=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for turn in messages %}{{ turn['content'] }} {% endfor %}"
    given = {"processing_class": tokenizer}
    if kind == "GRPO":
        args |= dict(max_completion_length=8, num_generations=2)
        rows = {"prompt": ["w3 w4 w5 w6"] * 8}
        given["reward_funcs"] = lambda completions, **_: [float(number) for number, _ in enumerate(completions)]
    else:
        args |= dict(max_new_tokens=8, lmbda=float(is_generating), max_length=16)
        turns = [{"role": "user", "content": "w3 w4"}, {"role": "assistant", "content": "w5 w6"}]
        rows = {"messages": [turns] * 8}
        given["teacher_model"] = AutoModelForCausalLM.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    given |= {"args": getattr(home, f"{kind}Config")(output, **args), "train_dataset": datasets.Dataset.from_dict(rows)}
    trainer = getattr(home, f"{kind}Trainer")(model, **given)
    if rung:
        patch(trainer.model, rung)
    batch = {name: torch.full((2, 24), 5) for name in ("input_ids", "labels")}
    step, kept = trainer.training_step, [measure_kept(trainer.model.train(), batch).total]

    def training_step(*args):
        loss = step(*args)
        kept.append(measure_kept(trainer.model.train(), batch).total)
        return loss

    trainer.training_step = training_step
    trainer.train()
    return kept, [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rung", ["block", "tiles", "max"])
@pytest.mark.parametrize("kind", ["GRPO", "GKD"])
def test_a_rung_is_in_place_after_generation(kind, rung, folder_with_tokenizer, tmp_path):
    kept, losses = kept_in_each_step(kind, folder_with_tokenizer, str(tmp_path), rung, is_generating=True)
    assert len(kept) == 4 and len(set(kept)) == 1
    stock, expected = kept_in_each_step(kind, folder_with_tokenizer, str(tmp_path), None, is_generating=True)
    assert kept[0] < 0.7 * stock[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-6)
