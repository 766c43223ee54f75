"""``scripts/equal_under.py`` on a tiny suite of a stranger: what it must find, and what it must not take for a find."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import equal_under  # noqa: E402

pytestmark = pytest.mark.long

SUITE = """
import os
import sys

import torch
from torch import nn

WRONG = 1 + 2**-20


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.act, self.down = nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1)

    def forward(self, x):
        return self.down(self.act(self.norm(self.up(x)))).sum()


class Planted(Net):
    def forward(self, x):
        y = self.up(x)
        if hasattr(self, "_memsave_patch"):
            y.register_hook(lambda gradient: gradient * WRONG)
        return self.down(self.act(y)).sum()


def step(model):
    x = torch.randn(4, 8, requires_grad=True)
    model(x).backward()
    return x


def test_equal():
    model = Net()
    for _ in range(2):
        step(model)


def test_equal_by_grad():
    x = torch.randn(4, 8, requires_grad=True)
    torch.autograd.grad(Net()(x), [x])


def test_without_backward():
    assert Net().eval()(torch.randn(2, 8)).ndim == 0


def test_of_no_model():
    torch.randn(3, requires_grad=True).sum().backward()


def test_planted():
    step(Planted())


def test_type():
    model = Net()
    step(model)
    assert type(model) is Net


def test_that_fails_anyway():
    step(Net())
    assert False


def test_that_fails_in_stock_alone():
    model = Net()
    step(model)
    assert type(model) is not Net


def test_of_the_process():
    torch.manual_seed(os.getpid())
    step(Net())


def test_that_ends_the_patched_run():
    if "hf_memsave" in sys.modules:
        os._exit(3)
"""

EXPECTED = {
    "test_equal": ("same", 2),
    "test_equal_by_grad": ("same", 1),
    "test_without_backward": ("same, nothing to compare", 0),
    "test_of_no_model": ("same, nothing to compare", 1),
    "test_planted": ("differ", 1),
    "test_type": ("only fails patched", 1),
    "test_that_fails_anyway": ("same", 1),
    "test_that_fails_in_stock_alone": ("other outcome", 1),
    "test_of_the_process": ("unstable", 1),
    "test_that_ends_the_patched_run": ("other outcome", 0),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder of three runs of the suite, and the exit status."""
    folder = tmp_path_factory.mktemp("stranger")
    suite = folder / "test_stranger.py"
    suite.write_text(SUITE)
    status = equal_under.main(["--keep", str(folder / "kept"), "--", "-q", "-p", "no:cacheprovider", str(suite)])
    return folder, status


def test_equal_under_tells_each_kind_and_hashes_each_backward(ran):
    folder, status = ran
    kinds = equal_under.compare(folder / "kept")
    found = {test.rpartition("::")[2]: kind for kind, tests in kinds.items() for test in tests}
    lines = equal_under.read(folder / "kept" / "stock.jsonl")
    counts = {name.rpartition("::")[2]: len(line["backwards"]) for name, line in lines.items()}
    assert {test: (found[test], counts[test]) for test in found} == EXPECTED
    assert status == 1


def test_equal_under_a_planted_gradient_leaves_the_loss_equal(ran):
    """It is found by the gradients' hashes."""
    stock, patched = (
        next(line for name, line in equal_under.read(ran[0] / "kept" / f"{run}.jsonl").items() if "planted" in name)
        for run in ("stock", "patched")
    )
    (before,), (after,) = stock["backwards"], patched["backwards"]
    assert before["losses"] == after["losses"]
    assert len(set(before["gradients"]) - set(after["gradients"])) == 3  # x, and both of the layer below the plant


LINE = {"outcome": "passed", "backwards": [{"losses": ["a"], "gradients": ["b"]}], "patched_calls": 1}


@pytest.mark.parametrize(
    ("patched", "status"),
    [({}, 0), ({"backwards": []}, 1), ({"outcome": "failed"}, 1), ({"outcome": "skipped"}, 1), (None, 1),
     ({"patched_calls": 0}, 2)],
    ids=str,
)  # fmt: skip
def test_equal_under_exit_status(tmp_path, patched, status):
    """None: the patched run wrote nothing."""
    for name, changed in zip(equal_under.RUNS, ({}, {}, patched), strict=True):
        if changed is not None:
            (tmp_path / f"{name}.jsonl").write_text(json.dumps(LINE | {"test": "test_some"} | changed))
    assert equal_under.report(tmp_path) == status


def test_equal_under_a_stock_run_that_breaks_off_compares_nothing(tmp_path):
    assert equal_under.main(["--keep", str(tmp_path), "--", "-p", "no:cacheprovider", str(tmp_path / "none.py")]) == 2
