"""What importing the package and the first ``patch()`` cost: modules that are loaded, and the seconds of our own."""

import re
import subprocess
import sys

import pytest

#: What ``import transformers`` and a model's class load anyhow.
BEFORE = "import transformers; from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel\n"
BUILD = (
    "config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,"
    "num_key_value_heads=2, vocab_size=96)\nmodel = LlamaForCausalLM(config)\n"
)
STEP = (
    "import torch; ids = torch.arange(8)[None]; model(input_ids=ids, labels=ids).loss.backward(); report.compare("
    "{'input_ids': ids, 'labels': ids})\n"
)
#: Libraries that cost seconds, and are for those who use them.
HEAVY = (
    "bitsandbytes",
    "peft",
    "datasets",
    "evaluate",
    "sklearn",
    "pandas",
    "matplotlib",
    "rich",
    "triton",
    "networkx",
)


def run(code: str, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=True)


def loaded_by(before: str, code: str) -> set[str]:
    found = run(f"import sys\n{before}known = set(sys.modules)\n{code}print(*(set(sys.modules) - known), sep='\\n')")
    return set(found.stdout.split())


@pytest.mark.parametrize(
    "code",
    [
        "import hf_memsave\n",
        "import hf_memsave; report = hf_memsave.patch(model)\n" + STEP,
        "import hf_memsave; report = hf_memsave.patch(model, 'few-bit')\n" + STEP,
        "import hf_memsave; LlamaForCausalLM._from_config(config, memsave=True)\n",
    ],
    ids=["import", "patch and step", "approximate", "from_config"],
)
def test_neither_import_nor_patch_loads_what_costs_seconds(code):
    loaded = loaded_by(BEFORE + BUILD, code)
    assert "hf_memsave.patching.patch" in loaded
    assert {name for name in loaded if name.startswith("torch._inductor")} == set()
    assert {name.partition(".")[0] for name in loaded} & set(HEAVY) == set()


def test_import_costs_at_most_three_tenths_of_a_second():
    """Beyond Transformers and the base class of its blocks, which every model loads; the clock is that of Python."""
    times = run(BEFORE + "import transformers.modeling_layers\nimport hf_memsave", "-X", "importtime").stderr
    found = re.findall(r"import time:\s+(\d+) \|\s+(\d+) \| (\S+)\n", times)  # \S: not inside another import
    ours = [int(cumulative) for _, cumulative, name in found if name == "hf_memsave"]
    assert len(ours) == 1 and 1000 < ours[0] < 300_000
