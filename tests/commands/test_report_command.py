"""``memsave report`` counts what a direct measurement does: of text, images, sound and any batch; and others run."""

import json
from collections import Counter

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig

from hf_memsave import MemSaveConfig, patch
from hf_memsave.cli import main
from hf_memsave.config.lora import Lora
from hf_memsave.config.sizes import gib
from hf_memsave.measure.inputs import inputs_of
from hf_memsave.measure.training import Training
from support.fake import directly
from support.helpers import on_stand_in, thinned

LAYER = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 64}
TOKENS = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 16}
PICTURE = {"image_size": 32, "patch_size": 8}
VIT = {"model_type": "vit", **LAYER, **PICTURE}
CONFIGS = {
    "ViTForImageClassification": VIT,
    # Neither a depth nor an image's size is in the configuration.
    "ResNetForImageClassification": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16],
                                     "depths": [1, 2], "layer_type": "basic"},
    "SegformerForSemanticSegmentation": {
        "model_type": "segformer", "hidden_sizes": [16] * 4, "depths": [1] * 4, "num_labels": 3, "image_size": 64,
        "num_attention_heads": [1, 2, 2, 4], "architectures": ["SegformerForSemanticSegmentation"]},
    "CLIPModel": {"model_type": "clip", "text_config": {**LAYER, **TOKENS}, "vision_config": {**LAYER, **PICTURE}},
    "WhisperForConditionalGeneration": {
        "model_type": "whisper", **TOKENS, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 24,
        "max_target_positions": 12, "decoder_start_token_id": 1, "encoder_layers": 2, "decoder_layers": 2,
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 64)},
    "Wav2Vec2ForSequenceClassification": {
        "model_type": "wav2vec2", **LAYER, "conv_dim": [16] * 7, "num_conv_pos_embeddings": 8, "layerdrop": 0.9,
        "num_conv_pos_embedding_groups": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0, "mask_time_prob": 0.0},
    "Qwen3MoeForCausalLM": {  # its layers are not alike
        "model_type": "qwen3_moe", **LAYER, **TOKENS, "head_dim": 8, "num_key_value_heads": 2, "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 16, "mlp_only_layers": [14], "num_hidden_layers": 18},
}  # fmt: skip
WIDTH = {"vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4}
TEXT = {
    "bert": {**WIDTH, "num_hidden_layers": 17, "intermediate_size": 128, "attention_probs_dropout_prob": 0.1},
    "llama": {**WIDTH, "num_hidden_layers": 16, "intermediate_size": 88, "num_key_value_heads": 2},
    "opt": {**WIDTH, "num_hidden_layers": 21, "ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64},
    "t5": {"vocab_size": 96, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "num_layers": 3,
           "num_decoder_layers": 17, "decoder_start_token_id": 0},
    # Every third layer attends to all tokens, the others to a window: two masks, and 17 is no multiple of three.
    "gemma3_text": {**WIDTH, "num_hidden_layers": 17, "intermediate_size": 64, "head_dim": 8, "num_key_value_heads": 2,
                    "layer_types": ((["sliding_attention"] * 2 + ["full_attention"]) * 6)[:17], "sliding_window": 8},
}  # fmt: skip
#: Options of a report beside the model's -> what they make of a training step.
STEPS = {
    ("--dtype", "fp32"): {"dtype": torch.float32},
    ("--autocast", "bf16"): {"dtype": torch.float32, "autocast": torch.bfloat16},
    ("--lora", "r=4,dropout=0.05"): {"lora": Lora(r=4, dropout=0.05)},
    ("--lora", "r=4,dtype=model,dora=true"): {"lora": Lora(r=4, dtype="model", dora=True)},
}


def run(capsys, command, folder, *options):
    status = main([command, str(folder), *map(str, options)])
    output, error = capsys.readouterr()
    assert status == 0, error
    return " ".join(output.split())


def report(capsys, folder, *options):
    output = run(capsys, "report", folder, *options, "--json", folder / "out.json")
    return output, json.loads((folder / "out.json").read_text())


def folder_of(tmp_path, config):
    """A folder with the configuration of a model, or of one of a type in TEXT."""
    config = {"model_type": config, **TEXT[config]} if isinstance(config, str) else config
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def measured(folder, **training):
    """Column of a report -> a model, and kept bytes by kind, measured directly."""
    config, setting = AutoConfig.from_pretrained(folder), Training(**training)
    return {name: directly(config, setting, how) for name, how in (("stock", None), ("patched", MemSaveConfig()))}


@on_stand_in
@pytest.mark.long
@pytest.mark.parametrize("cls", CONFIGS)
def test_report_makes_a_batch_and_counts_what_a_direct_measurement_counts(cls, tmp_path, capsys):
    folder = folder_of(tmp_path, CONFIGS[cls])
    output, figures = report(capsys, folder, "--dtype", "fp32", "--batch-size", 3, "--seq-len", 16)
    assert figures["cls"] == cls and "of the whole model" in output and "no loss" not in output
    assert all(f"{name} {shape}" in output for name, shape in figures["inputs"].items() if shape)
    assert {shape[0] for shape in figures["inputs"].values() if shape} == {3}
    for column, (_, kept) in measured(folder, batch_size=3, seq_len=16, dtype=torch.float32).items():
        assert figures[column]["by_kind"] == pytest.approx(kept, abs=2**13)
    assert f"{1 - figures['patched']['kept'] / figures['stock']['kept']:.0%} freed" in output


@pytest.mark.parametrize("cls", ["ResNetForImageClassification", "CLIPModel", "WhisperForConditionalGeneration"])
def test_verify_makes_a_batch_and_finds_equal_bits(cls, tmp_path, capsys):
    size = 2 if "ResNet" in cls else 1  # batch norms take no single image
    output = run(capsys, "verify", folder_of(tmp_path, CONFIGS[cls]), "--batch-size", size)
    assert f"{cls}, random weights: " in output and "Equal to the last bit" in output


@on_stand_in
def test_report_verify_and_auto_take_a_batch_of_images_and_report_says_where_there_is_no_loss(tmp_path, capsys):
    folder, path, plan = folder_of(tmp_path, VIT), tmp_path / "batch.pt", tmp_path / "plan.yaml"
    torch.save({"pixel_values": torch.randn(5, 3, 32, 32), "labels": torch.arange(5) % 2}, path)
    _, figures = report(capsys, folder, "--batch", path)
    for column, (_, kept) in measured(folder, batch_size=5, seq_len=1).items():
        assert figures[column]["kept"] == sum(kept.values())
    words = "pixel_values [5, 3, 32, 32], labels [5]"
    output = run(capsys, "verify", folder, "--batch", path, "--dtype", "bf16")
    assert words in output and "Equal to the last bit" in output
    assert words in run(capsys, "auto", folder, "--batch", path, "--memory", "850KiB", "--out", plan)
    assert MemSaveConfig.from_file(plan).is_exact
    output = run(capsys, "report", folder_of(tmp_path, {**VIT, "model_type": "clip_vision_model"}))
    assert "CLIPVisionModel returns no loss for this batch, so its whole output was held" in output


@on_stand_in
def test_a_batch_is_for_the_class_that_the_configuration_names_and_few_layers_tell_of_it(tmp_path, capsys):
    cls = "BertForQuestionAnswering"
    config = {"model_type": "bert", **LAYER, **TOKENS, "num_hidden_layers": 17, "architectures": [cls]}
    folder, positions = folder_of(tmp_path, config | {"attention_probs_dropout_prob": 0.0}), torch.tensor([1, 2])
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.long), "start_positions": positions, "end_positions": positions}
    torch.save(batch, tmp_path / "batch.pt")
    _, figures = report(capsys, folder, "--batch", tmp_path / "batch.pt", "--dtype", "fp32")
    assert figures["cls"] == cls and figures["patched"]["depths"][-1]["num_hidden_layers"] < 17
    assert figures["u"] == 2 * 8 * 32 * 4
    training = {"batch_size": 1, "seq_len": 1, "dtype": torch.float32, "inputs": inputs_of(batch)}
    for column, (_, kept) in measured(folder, **training).items():
        assert figures[column]["kept"] == pytest.approx(sum(kept.values()), rel=0.01)
    assert "BertForSequenceClassification" in run(capsys, "report", folder, "--seq-len", 16)


@on_stand_in
@pytest.mark.long
@pytest.mark.parametrize(("model_type", "options"), thinned(3, TEXT, STEPS))
def test_report_equals_a_direct_measurement_at_full_depth(model_type, options, tmp_path, capsys):
    folder = folder_of(tmp_path, model_type)
    _, figures = report(capsys, folder, *options, "--batch-size", 3, "--seq-len", 24)
    for column, (model, kept) in measured(folder, batch_size=3, seq_len=24, **STEPS[options]).items():
        assert figures[column]["kept"] == pytest.approx(sum(kept.values()), rel=0.001)
        assert {n: k for n, k in figures[column]["by_kind"].items() if k} == pytest.approx(kept, rel=0.01, abs=2**14)
        assert figures["numbers"]["parameters"] == model.num_parameters()
        is_few = max(figures[column]["depths"][-1].values()) < max(figures["depth"].values())
        assert is_few or model_type == "gpt2" or "bf16" in options
    sites = Counter((site.status, site.op, site.cls, site.reason) for site in patch(model, MemSaveConfig()).sites)
    assert {tuple(site): count for *site, count in figures["sites"]} == sites


@on_stand_in
def test_report_prints_sites_table_and_how_it_was_measured(tmp_path, capsys):
    command = ["report", str(folder_of(tmp_path, "t5")), "--seq-len", "16", "--json", str(tmp_path / "out.json")]
    assert main(command) == 0
    output, figures = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    lines = {line.split()[0]: line.split() for line in output.splitlines() if line.strip()}
    assert ["patched", "20", "block", "T5Block"] in [line.split() for line in output.splitlines()]
    _, stock, unit, patched, other, freed = lines["all"]
    assert {unit, other} <= {"KiB", "MiB"} and freed.endswith("%")
    assert f"Kept for backward: {patched} {other}, where stock keeps {stock} {unit}: {freed} freed." in output
    text = " ".join(output.split())
    for stack, field in (("encoder", "num_layers"), ("decoder", "num_decoder_layers")):
        sizes = [gib(figures[column]["per_layer"][field]) for column in ("stock", "patched")]
        assert sizes[0] != sizes[1] and "A layer of the {} keeps {} stock, {} patched".format(stack, *sizes) in text
    assert "T5ForConditionalGeneration, 3 + 17 layers, batch 2 x 16 tokens, bf16" in text
    assert "of 3 + 5 and 5 + 5 and 3 + 7 layers of full width (stock: 3 + 3 and 4 + 3 and 3 + 4); further" in text


@on_stand_in
@pytest.mark.long
@pytest.mark.parametrize("command", ["report", "estimate", "plan --budget 1TiB"])
def test_of_an_adapters_folder_its_lora_is_trained_with_the_head_for_its_task(command, tmp_path, capsys):
    (tmp_path / "base").mkdir()
    config = {"model_type": "llama", **TEXT["llama"]}
    lora = LoraConfig(r=2, lora_alpha=3, lora_dropout=0.1, target_modules=["q_proj", "up_proj"], use_dora=True)
    lora.base_model_name_or_path, lora.task_type = str(folder_of(tmp_path / "base", config)), "SEQ_CLS"
    lora.save_pretrained(tmp_path / "adapter")
    same = {"base": ["--lora", "r=2,alpha=3,dropout=0.1,targets=up_proj+q_proj,dora=true"], "adapter": []}
    found = []
    for name, options in reversed(same.items()):
        first, *more = command.split()
        run(
            capsys, first, tmp_path / name, *more, *options, *"--layers 2 --seq-len 16 --json".split(), tmp_path / "out"
        )
        found.append(json.loads((tmp_path / "out").read_text()))
        assert str(tmp_path / name) in (found[-1].pop("model", ""), found[-1].pop("model_or_config", ""))
        folder_of(tmp_path / "base", config | {"architectures": ["LlamaForSequenceClassification"]})
    assert found[0] == found[1]


@on_stand_in
@pytest.mark.long
def test_report_of_another_depth(tmp_path, capsys):
    few, many = (report(capsys, folder_of(tmp_path, "llama"), "--layers", layers)[1] for layers in (4, 9))
    assert (few["depth"], many["depth"]) == ({"num_hidden_layers": 4}, {"num_hidden_layers": 9})
    added = many["patched"]["kept"] - few["patched"]["kept"]
    assert added == 5 * many["patched"]["per_layer"]["num_hidden_layers"]
