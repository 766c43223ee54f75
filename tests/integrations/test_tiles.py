"""Blocks in tiles under trainers, adapters, quantized bases and PyTorch's own tools: stock's numbers, in float64."""

import contextlib
import copy
import functools
import gc
import io
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_memsave import MemSaveCallback, MemSaveConfig, MemSaveLoraConfig, MemSaveTrainer, patch
from hf_memsave.arch.versions import enable_checkpointing
from hf_memsave.patching.swap import is_patched
from hf_memsave.tape import current
from hf_memsave.tape.private import innermost_hooks, innermost_mode
from support.in_rows import SIZE, assert_near, in_rows, whole
from support.lora import quantized
from support.rows import Rows, arguments, logged
from support.steps import step
from support.threads import in_threads, switching
from support.zoo import Size, batch_for, build

TILES = MemSaveConfig(tiles=40)


def assert_tiled(model):
    assert "LlamaMLP" in in_rows(model) and not whole(model).keys() & in_rows(model)


def llama(size=SIZE, dtype=torch.float64):
    return build("llama", size, dtype)


def lora(model, **options):
    options = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.05, **options}
    torch.manual_seed(0)
    config = LoraConfig(init_lora_weights=False, **options)
    return get_peft_model(model, config, autocast_adapter_dtype=False).train()


def assert_alike(make, run, config=TILES, slack=1e-10, is_tiled=True):
    """``run`` of a model gives by name what it gives of a stock one, up to the order of sums."""
    stock, ours = make(), make()
    patch(ours, config)
    assert_near(run(ours), run(stock), slack)
    if is_tiled:
        assert_tiled(ours)


def two_steps(model, size=SIZE, **options):
    """And the state of the generator after each."""
    found = {}
    for seed in (7, 8):
        found |= {f"{seed} {name}": one for name, one in step(model, batch_for(model, size), seed, **options).items()}
        found[f"{seed} generator"] = torch.get_rng_state()
    return found


def trained(folder, model, cls=Trainer, checkpoint=None, steps=4, save_steps=2, **options):
    """What each step logs, and the weights and moments at the end."""
    fixed = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, save_strategy="steps")
    args = arguments(folder, max_steps=steps, save_steps=save_steps, **fixed)
    trainer = cls(model, args, train_dataset=Rows("llama", tokens=SIZE.seq), **options)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train(resume_from_checkpoint=checkpoint)
    entries = logged(trainer, "loss", "grad_norm")
    states = trainer.optimizer.state_dict()["state"]
    found = {f"{n}.{key}": value for n, entry in states.items() for key, value in entry.items()}
    found |= {name.replace("model.model.", "model."): p.detach() for name, p in trainer.model.named_parameters()}
    return found | {"logged": torch.tensor(entries, dtype=torch.float64), "generator": torch.get_rng_state()}


#: How a run comes to tiles.
DOORS = {
    "Trainer": lambda model: (model, Trainer, {"memsave": TILES}),
    "MemSaveTrainer": lambda model: (model, MemSaveTrainer, {"memsave": {"tiles": 40}}),
    "MemSaveCallback": lambda model: (model, Trainer, {"callbacks": [MemSaveCallback(TILES, undo=True)]}),
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """The folder of a stock run, and what it ends with."""
    folder = tmp_path_factory.mktemp("stock")
    return folder, trained(folder, llama())


@pytest.mark.long
@pytest.mark.parametrize("door", DOORS)
def test_a_run_that_accumulates_gradients_is_stocks_and_so_is_its_checkpoint(door, stock, tmp_path):
    model, cls, options = DOORS[door](llama())
    assert_near(trained(tmp_path, model, cls, **options), stock[1], 1e-8)
    assert any(map(is_patched, model.modules())) == (door != "MemSaveCallback")
    files = [load_file(folder / "checkpoint-4" / "model.safetensors") for folder in (tmp_path, stock[0])]
    assert_near(*files, 1e-8)
    if door == "Trainer":
        assert_tiled(model)
        load = functools.partial(AutoModelForCausalLM.from_pretrained, tmp_path / "checkpoint-4", dtype=torch.float64)
        loaded, plain = load(memsave=TILES).train(), load().train()
        assert_near(step(loaded, batch_for(loaded, SIZE)), step(plain, batch_for(plain, SIZE)))
        assert_tiled(loaded)


@pytest.mark.long
def test_a_resumed_run_ends_as_an_unbroken_one(tmp_path):
    """With the masks of LoRA's dropout."""
    options = dict(memsave=TILES, steps=2, save_steps=1)
    whole = trained(tmp_path, lora(llama()), **options)
    resumed = trained(tmp_path, lora(llama()), checkpoint=str(tmp_path / "checkpoint-1"), **options)
    assert_near(resumed, whole, 1e-8)


def test_presets_and_adapters_that_patch_by_themselves_come_to_tiles():
    """Of 256 tokens where a batch has 16 sequences."""
    long = Size(hidden=16, heads=2, layers=1, batch=16, seq=512)
    stock, ours = (build("llama", long, torch.float64) for _ in range(2))
    torch.manual_seed(0)
    options = dict(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    ours = get_peft_model(ours, MemSaveLoraConfig(**options, memsave="tiles"), autocast_adapter_dtype=False).train()
    torch.manual_seed(0)
    stock = get_peft_model(stock, LoraConfig(**options), autocast_adapter_dtype=False).train()
    assert_near(step(ours, batch_for(ours, long)), step(stock, batch_for(stock, long)))
    assert_tiled(ours)


def test_gradient_checkpointing_beside_tiles_is_stocks(tmp_path, caplog):
    def run(model):
        enable_checkpointing(model)
        return two_steps(model)

    assert_alike(llama, run, is_tiled=False)
    (line,) = [one for one in caplog.messages if "gradient checkpointing is on" in one]
    assert "MLPs in rows" in line


@pytest.mark.long
@pytest.mark.parametrize("options", [
    {"use_dora": True}, {"use_rslora": True, "target_modules": None, "task_type": "CAUSAL_LM"},
    {"target_modules": ["q_proj"], "modules_to_save": ["up_proj", "lm_head"]}, {"bias": "all", "lora_bias": True},
], ids=["DoRA", "rsLoRA", "modules to save", "biases"])  # fmt: skip
def test_kinds_of_lora(options):
    assert_alike(lambda: lora(llama(), **options), two_steps)


def test_an_adapter_of_two_blocks_and_two_adapters_at_once():
    def make():
        model = lora(llama())
        model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
        model.base_model.set_adapter(["default", "other"])
        first, second = model.base_model.model.model.layers
        first.self_attn.q_proj.lora_A = second.self_attn.q_proj.lora_A
        return model.double().train()

    assert_alike(make, two_steps)


@pytest.mark.long
@pytest.mark.parametrize("bits", [4, 8])
def test_lora_on_a_quantized_base(bits, saved):
    """The loss to the bit: of a token of int8's outliers no other token sees anything."""
    size = Size(hidden=64, seq=96)
    folder = saved(size)

    def make():
        model = quantized(folder, bits)
        with torch.no_grad():
            model.get_input_embeddings().weight[7, 3] = 20.0
        return model

    # Products in bf16 have other last bits for other numbers of rows: both are .0086 from products in fp32.
    assert_alike(make, lambda model: two_steps(model, size), slack=2**-13 if bits == 4 else 1e-5)


def repeated(times=4):
    """One block, used many times, as in ALBERT."""
    model = llama(Size(seq=SIZE.seq, layers=1))
    model.model.layers.extend([model.model.layers[0]] * (times - 1))
    model.config.update({"num_hidden_layers": times, "use_cache": False})  # the cache of one block would grow
    return model


def test_one_block_many_times_with_an_optimizer_in_backward():
    """Each weight's hook runs once a step, when all of its gradient is there."""

    def run(model):
        calls = []

        def update(weight):
            calls.append(weight)
            with torch.no_grad():
                weight.sub_(weight.grad, alpha=0.5)
            weight.grad = None

        for weight in model.parameters():
            weight.register_hook(lambda gradient: gradient * 2)
            weight.register_post_accumulate_grad_hook(update)
        for seed in range(3):
            model(**batch_for(model, SIZE, seed=seed)).loss.backward()
        assert len(calls) == 3 * len(list(model.parameters()))
        return {name: weight.detach() for name, weight in model.named_parameters()}

    assert_alike(repeated, run)


def test_hooks_of_a_block_and_of_what_it_gives_see_all_tokens():
    def run(model):
        first, second = model.model.layers
        seen = []
        first.register_forward_pre_hook(lambda block, args: (args[0] * 1.5, *args[1:]))
        first.register_forward_hook(lambda block, args, output: output.mul_(2))
        first.register_full_backward_hook(lambda block, inward, outward: (inward[0] * 3, *inward[1:]))
        first.register_forward_hook(lambda block, args, output: seen.append(output))
        second.register_full_backward_pre_hook(lambda block, outward: (outward[0] - outward[0].mean(1, keepdim=True),))
        found = two_steps(model)
        assert [tuple(output.shape) for output in seen] == 2 * [(SIZE.batch, SIZE.seq, SIZE.hidden)]
        return found

    assert_alike(llama, run)


class Stop(Exception):
    """Midway."""


@pytest.mark.parametrize("call", [2, 5, 8], ids=["forward", "backward, before attention", "backward, after attention"])
def test_an_exception_midway_leaves_no_tensor_and_no_mode(call, monkeypatch):
    model, calls, alive = lora(llama()), [], []
    patch(model, TILES)
    batch = batch_for(model, SIZE)
    expected = step(model, batch)
    model.zero_grad()
    stock = LlamaMLP.forward

    def forward(self, x):
        calls.append(x.shape)
        alive.append(weakref.ref(x))
        if len(calls) == call:
            raise Stop
        return stock(self, x)

    with monkeypatch.context() as within:
        within.setattr(LlamaMLP, "forward", forward)
        with pytest.raises(Stop):
            model(**batch).loss.backward()
    gc.collect()
    assert len(calls) == call and all(ref() is None for ref in alive)
    assert current() is None and innermost_mode() is None and innermost_hooks() is None
    assert_near(step(model, batch), expected)


def test_threads_that_share_a_model():
    model, wrong = llama(), []
    stock = copy.deepcopy(model)
    patch(model, TILES)  # so that threads make the plans, too
    batches = [batch_for(model, SIZE, seed=seed) for seed in range(3)]

    def gradients_of(batch, model=model):
        return torch.autograd.grad(model(**batch).loss, list(model.parameters()))

    def named(found):
        return dict(enumerate(found))

    expected = [named(gradients_of(batch, stock)) for batch in batches]

    def run(number):
        for _ in range(3):
            try:
                assert_near(named(gradients_of(batches[number])), expected[number])
            except Exception as error:
                wrong.append(repr(error))

    with switching(1e-5):
        in_threads(*(functools.partial(run, number) for number in range(3)))
    assert not wrong
    assert_tiled(model)


@pytest.mark.long
def test_offload_and_a_compiled_model():
    assert_alike(lambda: lora(llama()), two_steps, MemSaveConfig(tiles=40, offload=True))
    small = functools.partial(llama, Size(seq=SIZE.seq, layers=1))
    assert_alike(small, lambda model: two_steps(torch.compile(model, backend="eager")), is_tiled=False)
