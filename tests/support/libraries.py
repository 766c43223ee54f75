"""Libraries of kernels on small models: compiled on a GPU, or in Triton's interpreter."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from hf_memsave.ops.fused.kernels import kernels as ours
from support.kernels import IS_INTERPRETED


def with_liger(monkeypatch, model, family, **options):
    """The model, changed by Liger-Kernel. ``monkeypatch`` puts back what that changes in Transformers' file."""
    transformers = pytest.importorskip("liger_kernel.transformers")
    if IS_INTERPRETED:
        _complete_the_interpreter(monkeypatch)
    file = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    for name, value in [(name, value) for name, value in vars(file).items() if callable(value)]:
        monkeypatch.setattr(file, name, value)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    transformers._apply_liger_kernel_to_instance(model=base, **options)
    return model


def _complete_the_interpreter(monkeypatch):
    """Numbers are tensors where Triton compiles, and libdevice's functions do nothing where it interprets."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    stock = interpreter._implicit_cvt

    def with_numbers(argument):
        if not isinstance(argument, float):
            return stock(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)

    monkeypatch.setattr(interpreter, "_implicit_cvt", with_numbers)
    functions = {"rsqrt": lambda x: tl.math.rsqrt(x), "tanh": lambda x: 2 * tl.sigmoid(2 * x) - 1}
    for module in [module for name, module in sys.modules.items() if name.startswith("liger_kernel")]:
        for name in functions.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, functions[name])


def built_for_hub(folder):
    """Our kernels in a folder that ``kernels`` loads, laid out as kernel-builder does it for this machine."""
    backend = importlib.import_module("kernels.backends")._backend().name
    shutil.copytree(Path(ours().__file__).parent, variant := folder / "build" / f"torch-{backend}")
    metadata = {"id": "_memsave_kernels_of_a_test", "name": "memsave-kernels", "version": 1, "license": "apache-2.0"}
    (variant / "metadata.json").write_text(json.dumps({**metadata, "python-depends": [], "backend": {"type": backend}}))
    return folder


def kernelized(monkeypatch, model, repository):
    """The model, whose norms and MLPs ``kernels.kernelize`` gave our layers' forwards, as Transformers does it."""
    kernels = importlib.import_module("kernels")
    slots = {}
    for module in model.modules():
        name, activation = type(module).__name__, type(getattr(module, "act_fn", None)).__name__
        if name.endswith("RMSNorm"):
            layer = "GemmaRMSNorm" if name.startswith("Gemma") else "RMSNorm"
        elif hasattr(module, "gate_proj"):
            layer = "SwiGLUMLP" if activation.startswith("SiLU") else "GeGLUMLP"
        else:
            continue
        slots[layer] = {model.device.type: kernels.LocalLayerRepository(repository, layer_name=layer)}
        for key, value in {"kernel_layer_name": layer, "kernel_condition": staticmethod(lambda _: True)}.items():
            monkeypatch.setattr(type(module), key, value, raising=False)
    with kernels.use_kernel_mapping(slots, inherit_mapping=False):
        return kernels.kernelize(model, mode=kernels.Mode.TRAINING, device=model.device.type, use_fallback=False)
