"""Notebooks run, from top to bottom, and are committed with what they print and draw."""

import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.docs.pages import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
TRAINS = {"01_tour", "03_compare_a_sweep"}  # from the shell, up to half a minute
LARGEST = 200_000  # bytes


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


@pytest.mark.timeout(450)
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.full if path.stem in TRAINS else ())
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel is a process of its own; the package may be on this process's path only.
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "src"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{Path('/usr/bin')}:{Path('/bin')}")
    notebook = read(path)
    NotebookClient(
        notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_with_its_pictures_and_small(path: Path) -> None:
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert path.stat().st_size < LARGEST
    text = path.read_text(encoding="utf-8")
    assert "/tmp/" not in text and str(REPOSITORY) not in text
