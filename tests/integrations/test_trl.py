"""TRL's trainers take ``memsave=``, their YAML files ``model_init_kwargs: {memsave: true}``; both keep as little."""

import datasets
import pytest
import trl
import yaml
from peft import LoraConfig

from hf_memsave import ConfigError, MemSaveCallback, MemSaveConfig, measure_kept
from hf_memsave.patching.swap import is_patched, patch_of

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing.* is deprecated:FutureWarning")
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
        args = config(str(tmp_path), gradient_checkpointing=False, **choices, **FIXED)
        trainer = cls(
            folder_with_tokenizer, args=args, train_dataset=datasets.Dataset.from_dict(ROWS[kind]), memsave=memsave
        )
        if kind == "DPO":
            assert any(map(is_patched, trainer.ref_model.modules())) == ("model_init_kwargs" in choices)
        kept.append(kept_in_the_first_step(trainer))
    (by_loading, *losses), (by_trainer, loss), (stock, of_stock) = kept
    assert by_loading == by_trainer < 0.7 * stock and losses == [loss] == [of_stock]
