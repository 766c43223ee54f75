"""A fault to be found: a patched model with a wrong gradient."""

from hf_memsave.measure import step

_NOTHING = object()


def plant_wrong_gradient(monkeypatch, parameter="output.dense.weight", but_for=_NOTHING):
    """In ``compare_step``, patched gradients of such parameters are half as large again, but for one config."""
    patch = step.patch

    def wrong_patch(model, config):
        report = patch(model, config)
        for name, tensor in model.named_parameters():
            if name.endswith(parameter) and config != but_for:
                tensor.register_hook(lambda gradient: gradient * 1.5)
        return report

    monkeypatch.setattr(step, "patch", wrong_patch)
