"""``memsave verify``: equal where it is, and a planted difference is seen, named, and ends with status 1."""

import ctypes
import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoConfig, BertForSequenceClassification
from transformers.models.bert import modeling_bert

import hf_memsave
from hf_memsave.cli import main
from hf_memsave.commands import inputs
from hf_memsave.config.sizes import gib
from hf_memsave.measure import step
from hf_memsave.measure.inputs import fitted, read_batch
from hf_memsave.measure.step import compare_step
from support.zoo import Size, build, config_of

TINY = config_of("bert", Size(layers=1), attention_probs_dropout_prob=0.1)
IDS = torch.arange(12).reshape(2, 6) + 3
ON_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
BATCH = {"input_ids": IDS, "labels": torch.tensor([0, 1])}


def verify(capsys, *argv: object) -> tuple[int, str, str]:
    status = main(["verify", *map(str, argv)])
    output, error = capsys.readouterr()
    return status, " ".join(output.split()), error


@pytest.fixture
def bert(tmp_path) -> Path:
    """A folder with a small BERT's configuration, without weights."""
    TINY.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


@pytest.mark.parametrize(
    ("model", "options"),
    [("bert", ["--deterministic"]), ("llama", ["--autocast=bf16"]), ("t5-decoder", ["--dtype=bf16", "--seq-len=7"]),
     pytest.param("bert", ["--deterministic", "--device=cuda"], marks=ON_CUDA)],
    ids=str,
)  # fmt: skip
def test_verify_of_a_config_is_equal(model, options, tmp_path, capsys):
    config_of(model, Size(layers=1)).save_pretrained(tmp_path)
    ran = set()
    handle = register_module_forward_hook(lambda *_: ran.add(torch.is_autocast_enabled("cpu")))
    status, output, error = verify(capsys, tmp_path / "config.json", *options)
    handle.remove()
    assert (status, error, ran) == (0, "", {model == "llama"})
    assert "random weights: input_ids [2, " in output and "Equal to the last bit: the loss and all " in output
    assert ("bf16 autocast" in output) == (model == "llama")
    assert ("deterministic algorithms" in output) == (model == "bert")


def test_verify_of_saved_weights_prints_what_compare_step_found_in_all_layers(tmp_path, monkeypatch, capsys):
    model = BertForSequenceClassification(config_of("bert", Size(layers=3), attention_probs_dropout_prob=0.1)).train()
    model.save_pretrained(tmp_path / "saved")
    batch = {"input_ids": IDS.repeat(8, 8), "labels": torch.arange(16) % 2}
    torch.save(batch, tmp_path / "batch.pt")
    monkeypatch.setattr(inputs, "_MOST", 10)
    status, output, _ = verify(capsys, tmp_path / "saved", "--batch", tmp_path / "batch.pt")
    found = compare_step(model, batch)
    assert status == 0 and found.differing == () and found.repeat == found.tolerance == 0
    size = sum(p.numel() for p in model.parameters())
    taken = f"weights, gradients and their comparison take about {gib(4 * 4 * size)} of main memory ("
    assert f"{size / 1e6:,.1f} M parameters: {taken}" in output
    assert "weights of saved: input_ids [16, 48], labels [16]" in output
    assert "loss {:.7g} {:.7g} equal to the bit".format(*found.losses) in output
    count = len(list(model.parameters()))
    assert f"gradients {count} of {count} equal to the bit" in output
    assert found.stock == hf_memsave.measure_kept(model, batch) and 0 < found.patched.total < found.stock.total
    assert f"kept for backward {gib(found.stock.total)} {gib(found.patched.total)}" in output
    status, _, error = verify(capsys, tmp_path / "saved", "--layers", 1)
    assert status == 2 and "--layers: expected random weights" in error
    monkeypatch.setattr(inputs, "free_main_memory", lambda: 10**5)
    status, _, error = verify(capsys, tmp_path / "saved")
    assert status == 2 and re.search(
        r"take about .* of main memory: expected at most 97.66 KiB.*use --dtype bf16", error
    )


def test_verify_of_a_large_model_compares_two_of_its_layers_or_as_many_as_it_is_told(tmp_path, monkeypatch, capsys):
    config_of("bert", Size(layers=7)).save_pretrained(tmp_path)
    deep = tmp_path / "config.json"
    monkeypatch.setattr(inputs, "_MOST", 10_000)
    for layers, more in ((2, []), (5, ["--layers", 5])):
        status, output, error = verify(capsys, deep, *more)
        assert (status, error) == (0, "")
        few = BertForSequenceClassification(AutoConfig.from_pretrained(deep, num_hidden_layers=layers))
        asks = "parameters in 7 layers. Compared: 2 layers of that width, " in output and "--layers N" in output
        assert asks == (layers == 2)
        count = sum(p.numel() for p in few.parameters())
        assert f"{count / 1e6:.1f} M parameters" in output and f"all {len(list(few.parameters()))} gradients" in output
    monkeypatch.setattr(inputs, "_SHARE", 1e-9)
    status, _, error = verify(capsys, deep)
    assert status == 2 and "even 1 of its layers need" in error and "Use --dtype bf16, or name a config.json" in error


def test_the_same_batch_is_read_from_every_format(tmp_path):
    lists = {name: value.tolist() for name, value in BATCH.items()}
    rows = [{name: value[i] for name, value in lists.items()} for i in range(2)]
    texts = {"b.json": json.dumps(lists), "rows.json": json.dumps(rows), "b.jsonl": "\n".join(map(json.dumps, rows))}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    torch.save(BATCH, tmp_path / "b.pt")
    save_file(BATCH, tmp_path / "b.safetensors")
    for name in (*texts, "b.pt", "b.safetensors"):
        read = read_batch(tmp_path / name)
        assert read.keys() == BATCH.keys() and all(torch.equal(read[key], BATCH[key]) for key in BATCH)


def test_numbers_but_labels_are_in_the_dtype_of_the_weights():
    labels = torch.tensor([0.1, 0.2])
    batch = fitted(BATCH | {"labels": labels, "pixels": torch.ones(2), "return_loss": True}, nn.Linear(2, 2).half())
    assert batch["labels"] is labels and batch["input_ids"] is IDS and batch["return_loss"] is True
    assert batch["pixels"].dtype == torch.float16


def test_verify_of_an_adapter_compares_its_gradients(tmp_path, capsys):
    peft = pytest.importorskip("peft")
    base = build("llama", Size(layers=1))
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.1, init_lora_weights=False)
    peft.get_peft_model(base, lora).save_pretrained(tmp_path / "adapter")
    status, output, _ = verify(capsys, tmp_path / "adapter")
    assert status == 0 and "adapter adapter" in output and "all 4 gradients" in output
    weights = gib(4 * sum(p.numel() for p in build("llama", Size(layers=1)).parameters()))
    assert f"M parameters: weights take about {weights} of main memory" in output


def test_verify_sees_a_wrong_gradient_and_names_a_write_as_a_possible_cause(bert, capsys, monkeypatch):
    def forward(self, hidden_states):
        hidden = self.dense(hidden_states)
        output = self.intermediate_act_fn(hidden)
        numbers = (ctypes.c_float * hidden.numel()).from_address(hidden.untyped_storage().data_ptr())
        numbers[:] = [2 * number for number in numbers]
        return output

    monkeypatch.setattr(modeling_bert.BertIntermediate, "forward", forward)
    status, output, error = verify(capsys, bert)
    assert re.search(r"loss \S+ \S+ equal to the bit", output)  # a forward is right as it is
    assert status == 1 and "worst gradients" in output and "Different: 1 of 25 gradients." in output
    assert output.count("bert.encoder") == 1 and "bert.encoder.layer.0.output.dense.weight 1." in output
    assert "expected equal bits" in error and "please report" in error
    assert "unseen by PyTorch" in error and error.count("\n") == 1


def test_a_loss_in_chunks_is_equal_up_to_the_order_of_sums_and_a_fault_is_seen_there(tmp_path, capsys, monkeypatch):
    config_of("llama", Size(layers=1), vocab_size=32_800).save_pretrained(tmp_path / "llama")
    command = tmp_path / "llama", "--batch-size=2", "--seq-len=520", "--json", tmp_path / "found.json"
    status, output, error = verify(capsys, *command)
    assert (status, error) == (0, "") and "Equal within 1.5e-05: the loss in chunks" in output
    assert "with loss='stock' bits are equal" in output
    assert not all(one["equal"] for one in json.loads((tmp_path / "found.json").read_text())["gradients"])
    hf_memsave.MemSaveConfig(loss="stock").to_file(tmp_path / "stock.yaml")
    assert "Equal to the last bit" in verify(capsys, *command, "--memsave", tmp_path / "stock.yaml")[1]
    patch = step.patch

    def wrong_patch(model, config, **options):
        model.model.norm.weight.register_hook(partial(torch.mul, 1 + 1e-6))  # below what another order gives
        return patch(model, config, **options)

    monkeypatch.setattr(step, "patch", wrong_patch)
    status, output, error = verify(capsys, *command)
    assert status == 1 and "expected equal bits" in error and "Different: " in output


def test_of_the_gradients_that_differ_those_that_differ_most_are_shown(bert, capsys, monkeypatch):
    patch, planted = step.patch, []

    def wrong_patch(model, config):
        for name, parameter in model.named_parameters():
            if "output" in name and name.endswith("weight"):
                planted.append(name)
                parameter.register_hook(partial(torch.mul, 1 + len(planted)))
        return patch(model, config)

    monkeypatch.setattr(step, "patch", wrong_patch)
    status, output, _ = verify(capsys, bert)
    shown = re.findall(r"(bert\S+) (\d\.\d)", output.split("worst gradients")[1])
    most = [(name, f"{len(planted) - i}.0") for i, name in enumerate(planted[::-1])]
    assert status == 1 and len(most) > 2 and shown == most[:5]


def test_an_op_without_a_deterministic_form_is_told(bert, capsys, monkeypatch):
    def forward(self, hidden_states):
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")

    monkeypatch.setattr(modeling_bert.BertIntermediate, "forward", forward)
    status, output, error = verify(capsys, bert, "--deterministic")
    assert status == 2 and output.endswith(" free)")
    assert "does not have a deterministic implementation" in error and "Leave --deterministic out" in error


def test_a_write_after_the_forward_fails_the_patched_step_alone(bert, capsys, monkeypatch):
    written = []

    def forward(self, hidden_states, input_tensor):
        hidden = self.dense(hidden_states)
        written.append(mean := hidden.mean(1, keepdim=True))  # which stock keeps repeated
        return self.LayerNorm(mean.repeat(1, hidden.shape[1], 1) * self.LayerNorm.weight + hidden + input_tensor)

    def write(module, args, output):
        if isinstance(module, BertForSequenceClassification):
            written.pop().detach().mul_(2)

    monkeypatch.setattr(modeling_bert.BertOutput, "forward", forward)
    handle = register_module_forward_hook(write)
    status, output, error = verify(capsys, bert)
    handle.remove()
    assert status == 1 and output.endswith(" free)")
    assert "only the patched step failed: KeptTensorChangedError" in error
