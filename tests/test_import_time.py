"""What importing the package and the first ``patch()`` cost: modules that are loaded, and the seconds of our own."""

import subprocess
import sys

import pytest

from support.helpers import MATRIX

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
HEAVY = "bitsandbytes peft datasets evaluate sklearn pandas matplotlib rich triton networkx".split()


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.long
@pytest.mark.parametrize("preset", ["exact", *(pytest.param(name, marks=MATRIX) for name in ("few-bit", "wta-crs"))])
def test_neither_import_nor_patch_loads_what_costs_seconds(preset):
    """Nor does ``memsave=True``; and adapters are sampled where PEFT is imported after patching."""
    code = f"import sys\n{BEFORE}{BUILD}known = set(sys.modules)\nimport hf_memsave\n"
    code += f"report = hf_memsave.patch(model, {preset!r})\n{STEP}LlamaForCausalLM._from_config(config, memsave=True)\n"
    if preset == "exact":
        code += "hf_memsave.unpatch(model)\nlinear = hf_memsave.WTACRS(budget=0.3, targets=('lora_A',))\n"
        code += "hf_memsave.patch(model, hf_memsave.MemSaveConfig(linear=linear))\n"
    code += "print(*(set(sys.modules) - known))\n"
    if preset == "exact":
        code += "import peft\nlora = peft.LoraConfig(target_modules=['q_proj', 'v_proj'])\n"
        code += "from hf_memsave.patching.swap import is_patched\nmodel = peft.get_peft_model(model, lora)\n"
        code += "print(sum(is_patched(m) for n, m in model.named_modules() if n.endswith('lora_A.default')))\n"
    loaded, *sampled = run(code).splitlines()
    assert "hf_memsave.patching.patch" in loaded.split() and sampled == ["2"] * (preset == "exact")
    assert [name for name in loaded.split() if name.startswith("torch._inductor")] == []
    assert {name.partition(".")[0] for name in loaded.split()} & set(HEAVY) == set()


@pytest.mark.long
def test_import_costs_little_beside_that_of_transformers():
    """All of it, beyond Transformers and the base class of its blocks; .3 s, in seconds of one process, of 6.8."""
    clock = "times.append(time.process_time())\n"
    code = f"import time; times = []\n{clock}{BEFORE}import transformers.modeling_layers\n{clock}"
    begin, before, after = map(float, run(f"{code}from hf_memsave import patch\n{clock}print(*times)").split())
    assert 0.001 < after - before < 0.044 * (before - begin)


@pytest.mark.long
def test_import_loads_nothing_and_public_names_when_they_are_asked_for():
    run(
        "import sys, hf_memsave\nassert {name.partition('.')[0] for name in sys.modules} & {'torch', 'transformers', "
        "'yaml'} == set()\nassert hf_memsave.errors.ConfigError and not hasattr(hf_memsave, 'nope')\n"
        "assert set(hf_memsave.__all__) <= set(dir(hf_memsave))\n"
        "found = {}\nexec('from hf_memsave import *', found)\nassert set(hf_memsave.__all__) <= set(found)\n"
        "for name in hf_memsave.__all__:\n"
        "    assert found[name] is getattr(hf_memsave, name) and found[name].__name__ == name, name\n"
    )
