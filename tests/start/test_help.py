"""`--help`: what it shows, how wide it is, and that it does not do what made it slow."""

import ast
import copy
import re
import subprocess
import sys

import pytest
from hydra.core.config_store import ConfigStore

from sidestream.config.help import WIDTH
from sidestream.launch import entry
from tests.docs.pages import REPOSITORY, script

SCRIPTS = sorted(
    f"{folder}/{path.name}" for folder in ("scripts", "tools") for path in (REPOSITORY / folder).glob("*.py")
)
OF_HYDRA = ("train.py", "predict.py", "scripts/measure_overlap.py")

# Runs one command in a process of its own and says on stderr what it imported, and how often stores were copied.
SPY = """
import copy, runpy, sys
from hydra.core.config_store import ConfigStore
copies = []
original = copy.deepcopy
def counting(value, *rest, **named):
    if isinstance(value, ConfigStore):
        copies.append(original(value, *rest, **named) is not value)
    return original(value, *rest, **named)
copy.deepcopy = counting
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
heavy = {"torch", "lightning", "matplotlib", "wandb", "transformers", "scipy"}
print(sum(copies), *sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


def spied(*words: str) -> subprocess.CompletedProcess:
    code = [sys.executable, "-c", SPY, *words]
    return subprocess.run(code, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("command", OF_HYDRA)
@pytest.mark.sample(1)
def test_a_help_page_imports_nothing_heavy_and_copies_no_store(command: str):
    done = spied(command, "--help")
    assert done.returncode == 0, done.stderr
    assert done.stderr.split() == ["0"]
    assert max(map(len, done.stdout.splitlines())) <= WIDTH


def test_the_option_in_effect_is_the_first_one():
    page = spied("train.py", "--help", "model=small", "link=throttled").stdout
    first = dict(re.findall(r"^  (\w+) +.*\n +([\w/]+)", page, re.MULTILINE))
    assert (first["model"], first["link"], first["fusion"], first["data"]) == (
        "small",
        "throttled",
        "grouped",
        "python_source",
    )
    assert "config_groups" not in page.lower()


def test_a_store_is_not_copied_and_what_it_gives_out_is():
    entry.register()
    store = ConfigStore.instance()
    assert copy.deepcopy(store) is store
    assert store.load("schema/root.yaml").node is not store.load("schema/root.yaml").node


@pytest.mark.full
def test_a_page_of_hydra_still_lists_all_groups():
    page = spied("train.py", "--hydra-help").stdout
    assert "hydra/launcher: basic" in page and "ranks" in page


def test_completion_goes_the_same_short_way(monkeypatch: pytest.MonkeyPatch):
    """The shell asks by `-sc query=bash`."""
    monkeypatch.setenv("COMP_LINE", "train.py dispatcher=all")
    monkeypatch.setenv("COMP_POINT", "23")
    done = spied("train.py", "-sc", "query=bash")
    assert done.stderr.split() == ["0"]
    assert done.stdout.split() == ["dispatcher=allgather", "dispatcher=alltoall"]


@pytest.mark.parametrize("columns", ["80", "250"])
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in OF_HYDRA])
def test_helps_of_scripts_fit(
    name: str, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        script(name).main()
    assert end.value.code == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= WIDTH


def test_every_tool_answers_ctrl_c_before_it_imports_anything_else():
    for path in (REPOSITORY / "tools").glob("*.py"):
        body = ast.parse(path.read_text()).body[1:]  # behind the docstring
        first = body[1] if isinstance(body[0], ast.ImportFrom) and body[0].module == "__future__" else body[0]
        assert "interrupt.leave_at_once()" in ast.unparse(first), path
