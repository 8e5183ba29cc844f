"""`sidestream <command>`: the list, the nearest name, completion, and how commands are spelled where they are shown."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from sidestream import cli
from sidestream.launch import arguments
from tests.docs.pages import REPOSITORY

# Modules that take no time, all of them there before `sidestream` is imported but for its own.
LISTING = """
import sys
sys.argv = ["sidestream"]
before = set(sys.modules)
from sidestream import cli
try:
    cli.main()
except SystemExit as end:
    assert end.code == 0
print(*sorted(name for name in set(sys.modules) - before), file=sys.stderr)
"""


def called(*words: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs `python -m sidestream` with these words."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "sidestream", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_every_command_is_a_module_and_a_file_of_the_repository_that_starts_it():
    files = set()
    for name, (module, line) in cli.COMMANDS.items():
        assert callable(import_module(f"sidestream.commands.{module}").run)
        path = REPOSITORY / ("" if name in cli.IN_THE_ROOT else "scripts") / f"{module}.py"
        assert f'cli.script("{name}")' in path.read_text()
        assert ("@hydra.main" in path.read_text()) == (
            name in cli.OF_HYDRA
        )  # what fish asks before it completes
        assert line and not line.endswith(".") and len(line) < 80
        files.add(path)
    assert files == {*REPOSITORY.glob("*.py"), *(REPOSITORY / "scripts").glob("*.py")} - {
        REPOSITORY / "setup.py"
    }


def test_without_arguments_the_commands_are_listed_and_nothing_else_is_imported():
    done = subprocess.run([sys.executable, "-c", LISTING], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert listed == list(cli.COMMANDS)
    imported = set(done.stderr.split())
    assert {name for name in imported if name.startswith("sidestream")} == {
        "sidestream",
        "sidestream.cli",
        "sidestream.interrupt",
        "sidestream.matplotlibrc",
    }
    assert not {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names) - {"sidestream"}


@pytest.mark.parametrize(
    ("typed", "nearest"), [("trian", "train"), ("plot_loss", "plot-loss"), ("measure-overlap", "measure")]
)
def test_an_unknown_command_is_one_line_with_the_nearest(
    typed: str, nearest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(sys, "argv", ["sidestream", typed, "seed=1"])
    monkeypatch.setattr("sidestream.interrupt.leave_at_once", lambda: None)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: sidestream {typed}: ") and f"the nearest is {nearest}," in line


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("sidestream train dispatcher=all", ["dispatcher=allgather", "dispatcher=alltoall"]),
        ("sidestream predict  cluster=gb3", ["cluster=gb300_nvl72"]),
        ("sidestream che", ["check-part", "check-gpu", "check-cluster"]),
        ("sidestream ", list(cli.COMMANDS)),
        ("sidestream compare ", []),  # folders, which the shell knows
    ],
)
def test_a_shell_completes_commands_and_their_overrides(line: str, found: list[str]):
    done = called("-sc", "query=bash", COMP_LINE=line, COMP_POINT=str(len(line)))
    assert (done.returncode, done.stdout.split()) == (0, found), done.stderr


def test_the_help_of_an_installed_command_says_what_can_be_typed():
    for words in (["train", "--help"], ["predict", "--help"], ["measure", "--help"], ["eval", "--help"]):
        page = called(*words).stdout
        assert f"  sidestream {words[0]} " in page.replace("\n", "\n  ") and ".py" not in page.replace(
            "docs", ""
        )


def test_in_the_repository_a_text_stays_and_installed_it_names_the_command(monkeypatch: pytest.MonkeyPatch):
    text = (
        "run `python train.py --cfg job`, scripts/check_part.py my.Part or python mine.py\n"
        "torchrun --nproc-per-node 8 scripts/check_cluster.py --list"
    )
    monkeypatch.delenv(cli.CALLED, raising=False)
    monkeypatch.setattr(sys, "argv", [str(Path.cwd() / "train.py")])
    assert cli.spelled(text) == text
    assert cli.typed() == ["python", "train.py"] and cli.module() == "train"
    assert cli.typed("torchrun", "--nnodes=2") == ["torchrun", "--nnodes=2", "train.py"]
    monkeypatch.setenv(cli.CALLED, "measure")
    assert cli.spelled(text) == (
        "run `sidestream train --cfg job`, sidestream check-part my.Part or python mine.py\n"
        "torchrun --nproc-per-node 8 -m sidestream check-cluster --list"
    )
    assert cli.typed() == ["sidestream", "measure"] and cli.module() == "measure_overlap"
    assert cli.typed("torchrun", "--nnodes=2") == ["torchrun", "--nnodes=2", "-m", "sidestream", "measure"]
    assert cli.again()[1:] == ["-P", "-m", "sidestream", "measure"]


def test_a_folder_of_configs_is_relative_to_the_file_that_was_started_and_else_to_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(cli.CALLED, raising=False)
    monkeypatch.setattr(sys, "argv", ["../there/train.py"])
    words = ["-cp", "mine", "-m", "seed=1,2"]
    for name, folder in ((None, tmp_path.parent / "there"), ("train", tmp_path)):
        if name is not None:
            monkeypatch.setenv(cli.CALLED, name)
        rewritten = arguments.with_config_path(words)
        assert arguments.config_flags(rewritten) == ["--config-path", str(folder / "mine")]
        assert arguments.split(rewritten)[1] == ["seed=1,2"]
    for words in (["seed=1"], ["-cp", "pkg://my_pkg.conf"]):
        assert arguments.with_config_path(words) == words


def test_what_lies_in_the_current_folder_is_no_code(tmp_path: Path):
    """`python -m` would import it instead of the library."""
    (tmp_path / "omegaconf.py").write_text("raise SystemExit('imported from the current folder')")
    done = subprocess.run(
        [sys.executable, "-m", "sidestream", "train", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
