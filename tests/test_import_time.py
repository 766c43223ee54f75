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


def run(code: str, *options: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=True)


def loaded_by(before: str, code: str) -> set[str]:
    found = run(f"import sys\n{before}known = set(sys.modules)\n{code}print(*(set(sys.modules) - known), sep='\\n')")
    return set(found.stdout.split())


@pytest.mark.long
@pytest.mark.parametrize(
    "code",
    [
        "import hf_memsave; report = hf_memsave.patch(model)\n" + STEP,
        pytest.param("import hf_memsave; report = hf_memsave.patch(model, 'few-bit')\n" + STEP, marks=MATRIX),
        pytest.param("import hf_memsave; report = hf_memsave.patch(model, 'wta-crs')\n" + STEP, marks=MATRIX),
        "import hf_memsave; LlamaForCausalLM._from_config(config, memsave=True)\n",
    ],
    ids=["patch and step", "approximate", "sampled", "from_config"],
)
def test_neither_import_nor_patch_loads_what_costs_seconds(code):
    loaded = loaded_by(BEFORE + BUILD, code)
    assert "hf_memsave.patching.patch" in loaded
    assert {name for name in loaded if name.startswith("torch._inductor")} == set()
    assert {name.partition(".")[0] for name in loaded} & set(HEAVY) == set()


@pytest.mark.long
def test_import_costs_at_most_three_tenths_of_a_second():
    """All of it, beyond Transformers and the base class of its blocks; seconds of the process, not of the clock."""
    clock = "import time; begin = time.process_time()\nfrom hf_memsave import patch\nprint(time.process_time() - begin)"
    seconds = float(run(BEFORE + f"import transformers.modeling_layers\n{clock}").stdout)
    assert 0.001 < seconds < 0.3


def test_import_loads_nothing_and_public_names_when_they_are_asked_for():
    code = (
        "import sys, hf_memsave\nassert {name.partition('.')[0] for name in sys.modules} & {'torch', 'transformers', "
        "'yaml'} == set()\nassert hf_memsave.errors.ConfigError and not hasattr(hf_memsave, 'nope')\n"
        "assert set(hf_memsave.__all__) <= set(dir(hf_memsave))\n"
        "found = {}\nexec('from hf_memsave import *', found)\nassert set(hf_memsave.__all__) <= set(found)\n"
        "for name in hf_memsave.__all__:\n"
        "    assert found[name] is getattr(hf_memsave, name) and found[name].__name__ == name, name\n"
    )
    run(code)


@pytest.mark.long
def test_adapters_are_sampled_where_peft_is_imported_after_patching():
    code = (
        "import sys, hf_memsave; hf_memsave.patch(model, hf_memsave.MemSaveConfig(linear=hf_memsave.WTACRS(budget=0.3, "
        "targets=('lora_A',))))\nassert 'peft' not in sys.modules\nimport peft\n"
        "model = peft.get_peft_model(model, peft.LoraConfig(target_modules=['q_proj', 'v_proj']))\n"
        "from hf_memsave.patching.swap import is_patched\n"
        "print(sum(is_patched(m) for n, m in model.named_modules() if n.endswith('lora_A.default')))\n"
    )
    assert run(BEFORE + BUILD + code).stdout.split() == ["2"]
