"""A fault to be found: a patched model with a wrong gradient."""

from hf_memsave.measure import step

_NOTHING = object()


def plant_wrong_gradient(monkeypatch, parameter="output.dense.weight", but_for=_NOTHING):
    """In ``compare_step``, a patched model's gradients of such parameters are half as large again as stock's.

    Args:
        monkeypatch: Takes the fault back.
        parameter: How their names end.
        but_for: A configuration with which patching does not go wrong.
    """
    patch = step.patch

    def wrong_patch(model, config):
        report = patch(model, config)
        for name, tensor in model.named_parameters():
            if name.endswith(parameter) and config != but_for:
                tensor.register_hook(lambda gradient: gradient * 1.5)
        return report

    monkeypatch.setattr(step, "patch", wrong_patch)
