"""Images, sound, any batch: ``report`` counts what a direct measurement does, and ``verify`` and ``auto`` run."""

import json
import math

import pytest
import torch
import transformers
from transformers import AutoConfig

import hf_memsave
from hf_memsave import MemSaveConfig
from hf_memsave.cli import main
from hf_memsave.measure import kept_in_full

LAYER = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 64}
TOKENS = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 16}
PICTURE = {"image_size": 32, "patch_size": 8}
VIT = {"model_type": "vit", **LAYER, **PICTURE}
CONFIGS = {
    "ViTForImageClassification": VIT,
    # Neither a depth nor an image's size is in the configuration.
    "ResNetForImageClassification": {
        "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic",
    },
    "SegformerForSemanticSegmentation": {
        "model_type": "segformer", "hidden_sizes": [16] * 4, "depths": [1] * 4, "num_labels": 3, "image_size": 64,
        "num_attention_heads": [1, 2, 2, 4], "architectures": ["SegformerForSemanticSegmentation"],
    },
    "CLIPModel": {"model_type": "clip", "text_config": {**LAYER, **TOKENS}, "vision_config": {**LAYER, **PICTURE}},
    "WhisperForConditionalGeneration": {
        "model_type": "whisper", **TOKENS, "d_model": 32, "num_mel_bins": 8, "max_source_positions": 24,
        "max_target_positions": 12, "decoder_start_token_id": 1,
        **{f"{part}_{name}": size for part in ("encoder", "decoder")
           for name, size in {"layers": 2, "attention_heads": 4, "ffn_dim": 64}.items()},
    },
    "Wav2Vec2ForSequenceClassification": {
        "model_type": "wav2vec2", **LAYER, "conv_dim": [16] * 7, "num_conv_pos_embeddings": 8, "layerdrop": 0.9,
        "num_conv_pos_embedding_groups": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0, "mask_time_prob": 0.0,
    },
    "Qwen3MoeForCausalLM": {  # its layers are not alike
        "model_type": "qwen3_moe", **LAYER, **TOKENS, "head_dim": 8, "num_key_value_heads": 2, "num_experts": 2,
        "num_experts_per_tok": 1, "moe_intermediate_size": 16, "mlp_only_layers": [14], "num_hidden_layers": 18,
    },
}  # fmt: skip


def run(capsys, *argv):
    status = main([str(word) for word in argv])
    output, error = capsys.readouterr()
    assert status == 0, error
    return " ".join(output.split())


def folder_of(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def directly(cls, folder, batch, dtype):
    """Kept bytes, stock and patched, of a model that is built here."""
    config = AutoConfig.from_pretrained(folder, use_cache=False)
    config.layerdrop = 0.0
    model = getattr(transformers, cls)._from_config(config, dtype=dtype).train()
    stock = hf_memsave.measure_kept(model, batch)
    hf_memsave.patch(model)
    return stock.by_kind, hf_memsave.measure_kept(model, batch).by_kind


@pytest.mark.long
@pytest.mark.parametrize("cls", CONFIGS)
def test_report_makes_a_batch_and_counts_what_a_direct_measurement_counts(cls, tmp_path, capsys):
    folder, out = folder_of(tmp_path, CONFIGS[cls]), tmp_path / "out.json"
    options = ("--dtype", "fp32", "--batch-size", 3, "--seq-len", 16, "--json", out)
    output, figures = run(capsys, "report", folder, *options), json.loads(out.read_text())
    assert figures["class"] == cls and "forward of the whole model" in output and "no loss" not in output
    assert all(f"{name} {shape}" in output for name, shape in figures["inputs"].items() if shape)
    assert {shape[0] for shape in figures["inputs"].values() if shape} == {3}
    numbers = ("pixel_values", "input_values", "input_features")
    batch = {
        name: torch.randn(shape) if name in numbers else torch.ones(shape, dtype=torch.long)
        for name, shape in figures["inputs"].items()
    }
    stock, patched = directly(cls, folder, batch, torch.float32)
    assert figures["stock"]["by_kind"] == stock
    assert {kind: kept for kind, kept in figures["patched"]["by_kind"].items() if kept} == patched
    assert ("layerdrop is 0" in output) == (cls == "Wav2Vec2ForSequenceClassification")
    assert f"{1 - sum(patched.values()) / sum(stock.values()):.0%} freed" in output


@pytest.mark.parametrize("cls", ["ResNetForImageClassification", "CLIPModel", "WhisperForConditionalGeneration"])
def test_verify_makes_a_batch_and_finds_equal_bits(cls, tmp_path, capsys):
    size = 2 if "ResNet" in cls else 1  # batch norms take no single image
    output = run(capsys, "verify", folder_of(tmp_path, CONFIGS[cls]), "--batch-size", size)
    assert f"{cls}, random weights: " in output and "Equal to the last bit" in output


def test_report_verify_and_auto_take_a_batch_of_images(tmp_path, capsys):
    folder, path, plan = folder_of(tmp_path, VIT), tmp_path / "batch.pt", tmp_path / "plan.yaml"
    batch = {"pixel_values": torch.randn(5, 3, 32, 32), "labels": torch.arange(5) % 2}
    torch.save(batch, path)
    run(capsys, "report", folder, "--batch", path, "--json", tmp_path / "out.json")
    figures = json.loads((tmp_path / "out.json").read_text())
    cast = batch | {"pixel_values": batch["pixel_values"].bfloat16()}
    sizes = directly("ViTForImageClassification", folder, cast, torch.bfloat16)
    assert [figures[name]["total"] for name in ("stock", "patched")] == [sum(kept.values()) for kept in sizes]
    words = "pixel_values [5, 3, 32, 32], labels [5]"
    output = run(capsys, "verify", folder, "--batch", path, "--dtype", "bf16")
    assert words in output and "Equal to the last bit" in output
    assert words in run(capsys, "auto", folder, "--batch", path, "--memory", "850KiB", "--out", plan)
    assert MemSaveConfig.from_file(plan).is_exact


def test_a_batch_is_for_the_class_that_the_configuration_names_and_few_layers_tell_of_it(tmp_path, capsys):
    cls, out = "BertForQuestionAnswering", tmp_path / "out.json"
    config = {"model_type": "bert", **LAYER, **TOKENS, "num_hidden_layers": 17, "architectures": [cls]}
    folder, positions = folder_of(tmp_path, config | {"attention_probs_dropout_prob": 0.0}), torch.tensor([1, 2])
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.long), "start_positions": positions, "end_positions": positions}
    torch.save(batch, tmp_path / "batch.pt")
    run(capsys, "report", folder, "--batch", tmp_path / "batch.pt", "--dtype", "fp32", "--json", out)
    figures = json.loads(out.read_text())
    assert figures["class"] == cls and figures["measured"]["patched"][-1]["num_hidden_layers"] < 17
    assert figures["u"] == 2 * 8 * 32 * 4
    sizes = directly(cls, folder, batch, torch.float32)
    assert [figures[name]["total"] for name in ("stock", "patched")] == [sum(kept.values()) for kept in sizes]
    assert "BertForSequenceClassification" in run(capsys, "report", folder, "--seq-len", 16)


def test_report_of_a_model_without_a_loss_says_so(tmp_path, capsys):
    output = run(capsys, "report", folder_of(tmp_path, {**VIT, "model_type": "clip_vision_model"}))
    assert "CLIPVisionModel returns no loss for this batch, so its whole output was held" in output


def test_a_forward_that_fills_the_memory_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(kept_in_full, "_RESERVE", math.inf)
    folder = folder_of(tmp_path, CONFIGS["ResNetForImageClassification"])
    assert main(["report", str(folder), "--batch-size", "8"]) == 2
    assert "the forward fills the memory" in capsys.readouterr().err
