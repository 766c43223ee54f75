"""TRL: ``model_init_kwargs: {memsave: true}`` in the YAML file of an ``SFTConfig`` patches the model that it loads."""

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import hf_memsave  # noqa: F401  from now on from_pretrained takes memsave=
from hf_memsave.patching.swap import is_patched
from support.families import VOCAB, Size, build

pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing.* is deprecated:FutureWarning")


@pytest.mark.parametrize(("choice", "is_asked"), [("true", True), ("exact", True), ("false", False)])
def test_a_yaml_file_of_sft_config_patches_the_model(tmp_path, choice, is_asked):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    build("llama", Size(hidden=16, heads=2, layers=1)).save_pretrained(tmp_path / "model")
    words = models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w1")
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="w0", eos_token="w2", unk_token="w1"
    ).save_pretrained(tmp_path / "model")
    file = tmp_path / "sft.yaml"
    file.write_text(
        f"output_dir: {tmp_path / 'out'}\nmax_steps: 1\nuse_cpu: true\nbf16: false\nreport_to: none\n"
        f"save_strategy: 'no'\nmodel_init_kwargs: {{memsave: {choice}}}\n"
    )
    (config,) = trl.TrlParser(trl.SFTConfig).parse_args_and_config(["--config", str(file)])
    rows = datasets.Dataset.from_dict({"input_ids": [[3, 4, 5, 6]] * 8})
    trainer = trl.SFTTrainer(str(tmp_path / "model"), config, train_dataset=rows)
    assert is_patched(trainer.model) == is_asked
    trainer.train()
