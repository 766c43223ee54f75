"""The quickstart notebook runs from top to bottom, without network, and shows what it says."""

import asyncio
import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "01_quickstart.ipynb"
SECONDS = 240  # it takes one alone; other tests may run beside it
CLAIMS = [
    "every loss equal, stock and patched",
    "same keys",
    "every gradient equal, stock and patched",
    "every loss equal, stock and patched",
    "keeps what stock keeps",
]

pytestmark = pytest.mark.long


def execute(notebook, folder: Path) -> str:
    """Run every cell with ``folder`` as the current one; returns what was printed."""
    client = nbclient.NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    asyncio.run(asyncio.wait_for(client.async_execute(), SECONDS))
    return "".join(output.text for output in outputs(notebook) if output.get("name") == "stdout")


def outputs(notebook) -> list:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.fixture(autouse=True)
def _kernel_environment(tmp_path, monkeypatch):
    """The kernel sees no network, and nothing of the user's own Jupyter; it leaves its files in the test's folder."""
    monkeypatch.delenv("MPLBACKEND", raising=False)
    for name in ("HF_HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_notebook_runs_and_shows_what_it_says(tmp_path):
    folder = tmp_path / "cwd"
    folder.mkdir()
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    printed = execute(notebook, folder)
    assert not [output for output in outputs(notebook) if output.output_type == "error"]
    assert re.findall(r"^(.*): (True|False)$", printed, flags=re.MULTILINE) == [(claim, "True") for claim in CLAIMS]
    assert re.search(r"hf_memsave: 1 models and [1-9]\d* repeated blocks covered, 0 modules skipped", printed)
    assert "memsave/kept_mib" in printed and "memsave/freed_mib" in printed
    kept = re.findall(r"stock keeps ([\d.]+) MiB, patched ([\d.]+) MiB", printed)
    assert len(kept) == 2 and all(float(patched) < 0.6 * float(stock) for stock, patched in kept)
    pictures = [output.data["image/png"] for output in outputs(notebook) if "image/png" in output.get("data", {})]
    assert len(pictures) == 1 and len(pictures[0]) > 10_000
    assert list(folder.iterdir()) == []


def test_an_error_in_a_cell_is_not_passed_over(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
        execute(notebook, tmp_path)


def test_notebook_is_committed_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert outputs(notebook) == []
    assert all(cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
    assert notebook.metadata.kernelspec.name == "python3"
