"""Every notebook runs from top to bottom, without network, and prints what is committed, and nothing on stderr."""

import asyncio
import itertools
import re
from pathlib import Path

import pytest

from support.helpers import MATRIX

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
start_new_kernel = pytest.importorskip("jupyter_client.manager").start_new_kernel
pytest.importorskip("matplotlib")

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
SECONDS = 240  # each says about a minute; the longest takes one and a half beside other programs
#: Notebook -> of how many of its results it says that they are as they should be, each True; and pictures it draws.
CLAIMS = {
    "01_quickstart": (6, 2),
    "02_lora_at_the_floor": (3, 1),
    "03_wta_crs": (5, 2),
    "04_will_it_fit": (2, 1),
    "05_your_own_model": (5, 1),
}
NUMBER = r"\d+(?:\.\d+)?"
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """One for all notebooks: most of their time is PyTorch's import. It sees no network, and nothing of the user's."""
    folder = tmp_path_factory.mktemp("kernel")
    with pytest.MonkeyPatch.context() as patches:
        patches.delenv("MPLBACKEND", raising=False)
        for name in ("HF_HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
            patches.setenv(name, str(folder / name.lower()))
        patches.setenv("HF_HUB_OFFLINE", "1")
        patches.setenv("OMP_NUM_THREADS", "1")
        manager, client = start_new_kernel(kernel_name="python3")
        client.stop_channels()
        yield manager
        manager.shutdown_kernel(now=True)


def execute(notebook, folder, kernel):
    """Run every cell, with no name of an earlier notebook, and ``folder`` as the current one."""
    begin = nbformat.v4.new_code_cell(f"%reset -f\nimport os; os.chdir({str(folder)!r}); del os")
    notebook.cells.insert(0, begin)
    asyncio.run(asyncio.wait_for(nbclient.NotebookClient(notebook, km=kernel).async_execute(), SECONDS))
    del notebook.cells[0]


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def printed_by(cell):
    return "".join(output.text for output in cell.get("outputs", []) if output.get("name") == "stdout")


def same_line(committed, fresh):
    """Whether a cell has printed this again. Losses and errors may differ in their last digits, nothing else may."""
    if not re.search(r"\b(loss|error)\b", committed):
        return committed == fresh
    expected, got = [[float(number) for number in re.findall(NUMBER, line)] for line in (committed, fresh)]
    return re.sub(NUMBER, "#", committed) == re.sub(NUMBER, "#", fresh) and got == pytest.approx(expected, rel=0.01)


def printed_otherwise(committed, fresh):
    """The lines that the committed notebook shows and a fresh run does not print, beside what it prints there."""
    cells = [(printed_by(a), printed_by(b)) for a, b in zip(committed.cells, fresh.cells, strict=True)]
    pairs = [pair for a, b in cells for pair in itertools.zip_longest(a.splitlines(), b.splitlines(), fillvalue="")]
    return [pair for pair in pairs if not same_line(*pair)]


def check(notebook, name):
    """Refuse a notebook whose outputs do not show what it says, or that writes to stderr."""
    claims, pictures = CLAIMS[name]
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert [output.text for output in outputs(notebook) if output.get("name") == "stderr"] == []
    printed = "".join(map(printed_by, notebook.cells))
    assert re.findall(r"^.*: (True|False)$", printed, flags=re.MULTILINE) == ["True"] * claims
    drawn = [output.data["image/png"] for output in outputs(notebook) if "image/png" in output.get("data", {})]
    assert len(drawn) == pictures and all(4_000 < len(picture) < 60_000 for picture in drawn)
    if name == "01_quickstart":
        assert re.search(r"hf_memsave: 1 model and [1-9]\d* repeated blocks covered, 0 modules skipped", printed)
        assert "memsave/kept_gib" in printed and "memsave/freed_fraction" in printed
        kept = re.findall(r"stock keeps ([\d.]+) MiB, patched ([\d.]+) MiB", printed)
        assert len(kept) == 2 and all(float(patched) < 0.6 * float(stock) for stock, patched in kept)


SHORT = ("02_lora_at_the_floor", "05_your_own_model")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SHORT else MATRIX) for name in CLAIMS])
def test_notebook_runs_and_shows_what_it_says(name, tmp_path, kernel):
    notebook = read(name)
    execute(notebook, tmp_path, kernel)
    check(notebook, name)
    assert printed_otherwise(read(name), notebook) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("committed", "fresh", "same"),
    [
        ("keeps 41.1 MiB", "keeps 40.5 MiB", False),
        ("1 loss 4.645 -> 2.267", "1 loss 4.646 -> 2.268", True),
        ("1 loss 4.645 -> 2.267", "1 loss 4.645 -> 2.467", False),
        ("1 loss 4.645 -> 2.267", "2 loss 4.645 -> 2.267", False),
        ("loss 4.645", "loss: 4.645", False),
        ("every loss equal: True", "", False),
    ],
)
def test_a_figure_that_went_stale_is_seen(committed, fresh, same):
    shown = [nbformat.v4.new_output("stream", text=text) for text in (committed, fresh)]
    books = [nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[output])]) for output in shown]
    assert (printed_otherwise(*books) == []) is same


def test_every_notebook_is_known_and_committed_with_its_outputs():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(CLAIMS)
    for name in CLAIMS:
        notebook = read(name)
        nbformat.validate(notebook)
        check(notebook, name)
        cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
        assert notebook.metadata.kernelspec.name == "python3"
        assert not re.search(r"/(home|root|tmp|work|Users)/", str(outputs(notebook)))
