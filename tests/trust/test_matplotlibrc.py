"""What lies in the current folder under the name of matplotlib's settings is neither opened nor obeyed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sidestream import matplotlibrc
from sidestream.launch import worker
from sidestream.measure import worker as measuring

DRAWS = """
import os, sys
from sidestream import interrupt
interrupt.leave_at_once()
import matplotlib
assert os.getcwd() == sys.argv[1]
print(matplotlib.rcParams["lines.linewidth"])
"""


def width(folder: Path, **variables: str) -> str:
    command = [sys.executable, "-c", DRAWS, str(folder)]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=50
    )
    assert not done.stderr
    return done.stdout.strip()


def test_a_pipe_hangs_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "matplotlibrc")
    assert width(tmp_path) == "1.5"


def test_a_file_is_not_obeyed_unless_the_user_names_it(tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("lines.linewidth: 77\n")
    assert width(tmp_path) == "1.5"
    assert width(tmp_path, MATPLOTLIBRC="matplotlibrc") == "77.0"


class Asked(Exception):
    """The settings of the current folder are kept out."""


@pytest.mark.parametrize("main", [worker.main, measuring.main])
def test_a_rank_keeps_them_out_before_anything_else(
    main: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ignore() -> None:
        raise Asked

    monkeypatch.setattr(matplotlibrc, "ignore", ignore)
    for module in (worker, measuring):
        monkeypatch.setattr(module, "die_with_parent", lambda number: None)
    monkeypatch.setattr(worker.terminal, "outlive", lambda: None)
    with pytest.raises(Asked):
        main()
