"""TRL's trainers take ``memsave=``, and their YAML files ``model_init_kwargs: {memsave: true}``."""

import datasets
import pytest
import trl
import yaml
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_memsave import ConfigError, MemSaveCallback, MemSaveConfig
from hf_memsave.patching.swap import is_patched, patch_of
from support.families import VOCAB, Size, build

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing.* is deprecated:FutureWarning")
FIXED = {"max_steps": 1, "use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no"}
ROWS = {
    "SFT": {"input_ids": [[3, 4, 5, 6]] * 8},
    "Reward": {"chosen": ["w3 w4"] * 8, "rejected": ["w3 w5"] * 8},
    "DPO": {"prompt": ["w3"] * 8, "chosen": ["w4 w5"] * 8, "rejected": ["w6 w7"] * 8},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build("llama", Size(hidden=16, heads=2, layers=1)).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w2", unk_token="w1")
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("choice", "is_asked"), [("true", True), ("false", False)])
def test_a_yaml_file_of_sft_config_patches_the_model(folder, tmp_path, choice, is_asked):
    file = tmp_path / "sft.yaml"
    options = {**FIXED, "output_dir": str(tmp_path / "out"), "model_init_kwargs": {"memsave": yaml.safe_load(choice)}}
    file.write_text(yaml.safe_dump(options), encoding="utf-8")
    (config,) = trl.TrlParser(trl.SFTConfig).parse_args_and_config(["--config", str(file)])
    trainer = trl.SFTTrainer(folder, config, train_dataset=datasets.Dataset.from_dict(ROWS["SFT"]))
    assert is_patched(trainer.model) == is_asked
    trainer.train()


@pytest.mark.parametrize("kind", ROWS)
def test_a_trainer_that_lists_its_arguments_takes_memsave(kind, folder, tmp_path):
    cls, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    args = config(str(tmp_path), logging_steps=1, **FIXED)
    peft_config = LoraConfig(target_modules=["q_proj", "v_proj"])
    options = dict(train_dataset=datasets.Dataset.from_dict(ROWS[kind]), peft_config=peft_config)
    with pytest.raises(ConfigError, match="unknown preset 'exakt'"):
        cls(folder, args=args, **options, memsave="exakt")
    trainer = cls(folder, args=args, **options, memsave={"checkpoint": "gate"})
    (callback,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, MemSaveCallback))
    assert callback.config == patch_of(trainer.model).config == MemSaveConfig(checkpoint="gate")
    trainer.train()
    assert trainer.state.log_history[0]["memsave/freed_mib"] > 0
