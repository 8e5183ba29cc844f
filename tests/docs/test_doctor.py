"""scripts/doctor.py: every option there is, on machines with and without what it needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sidestream.config.availability import LIBRARIES, Machine
from sidestream.config.compatibility import check
from sidestream.config.errors import ConfigError
from tests.config.machines import H100, LAPTOP, MACHINES
from tests.docs.pages import REPOSITORY, script
from tests.train.fit import compose_run

doctor = script("scripts/doctor.py")
CONF = REPOSITORY / "conf"


def tables(machine: Machine, path: Path) -> dict:
    assert doctor.main(["--json", str(path)], machine=machine) == 0
    return json.loads(path.read_text())


def names(group: str) -> set[str]:
    return {path.stem for path in (CONF / group).glob("*.yaml")}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.sample(3)
def test_every_option_is_in_the_tables(machine: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    found = tables(MACHINES[machine], tmp_path / "doctor.json")
    dispatchers = {(row["dispatcher"], row["transport"]) for row in found["dispatchers"]}
    assert {option for option, _ in dispatchers} == names("dispatcher")
    assert len(dispatchers) == len(found["dispatchers"]) == len(names("dispatcher")) + len(LIBRARIES)
    for group in ("overlap", "fusion", "graph", "link", "strategy"):
        assert {row["option"] for row in found["options"] if row["group"] == group} == names(group)
    printed = capsys.readouterr().out
    assert all(option in printed for option, _ in dispatchers)


def test_a_new_option_needs_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """The tables are read from conf/."""
    for group in ("dispatcher", "overlap"):
        (tmp_path / group).mkdir()
        (tmp_path / group / "brand_new.yaml").write_text("_target_: my_pkg.X\n")
    monkeypatch.setattr(doctor, "CONF", tmp_path)
    found = tables(LAPTOP, tmp_path / "doctor.json")
    (row,), (other,) = found["dispatchers"], found["options"]
    assert (row["dispatcher"], row["transport"], row["ok"]) == ("brand_new", "torch", True)
    assert (row["eager_reads"], row["static_reads"]) == (None, None)
    assert (other["group"], other["option"], other["ok"]) == ("overlap", "brand_new", True)
    assert "unknown" in capsys.readouterr().out


def test_host_reads_of_each_mode(tmp_path: Path):
    rows = tables(H100, tmp_path / "doctor.json")["dispatchers"]
    reads = {
        (row["dispatcher"], row["transport"]): (
            row["eager_reads"],
            row["static_reads"] if row["static"] else "-",
        )
        for row in rows
    }
    assert reads == {
        ("allgather", "torch"): (1, 0),
        ("alltoall", "torch"): (1, 0),
        ("local", "none"): (0, "-"),
        ("none", "none"): (0, "-"),  # fusion=mega
        ("nccl_ep", "library"): (2, 0),
        ("nccl_ep", "torch"): (1, 0),
        ("deep_ep", "library"): (1, 0),
        ("deep_ep", "torch"): (1, 0),
        ("hybrid_ep", "library"): (1, 0),
        ("hybrid_ep", "torch"): (1, 0),
    }


@pytest.mark.parametrize(
    ("machine", "runs", "auto"),
    [
        ("laptop", set(), set()),
        ("h100", {"nccl_ep", "deep_ep"}, {"nccl_ep", "deep_ep", "hybrid_ep"}),
        ("h100_bare", set(), set()),
        ("a100", set(), {"nccl_ep", "deep_ep", "hybrid_ep"}),
    ],
)
def test_which_libraries_run_and_which_auto_takes(
    machine: str, runs: set[str], auto: set[str], tmp_path: Path
):
    rows = tables(MACHINES[machine], tmp_path / "doctor.json")["dispatchers"]
    libraries = [row for row in rows if row["transport"] == "library"]
    assert {row["dispatcher"] for row in libraries if row["ok"]} == runs
    assert {row["dispatcher"] for row in libraries if row["auto"]} == auto
    others = [row for row in rows if row["transport"] != "library"]
    assert all(row["ok"] for row in others)
    assert {row["dispatcher"] for row in others if row["auto"]} == set(LIBRARIES) - auto


@pytest.mark.parametrize("machine", ["laptop", "h100_bare", "h100_hybrid", "one_h100"])
def test_its_words_are_those_of_the_refusal(
    machine: str, tmp_path: Path, compose, monkeypatch: pytest.MonkeyPatch
):
    there = MACHINES[machine]
    rows = tables(there, tmp_path / "doctor.json")["dispatchers"]
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: there))
    refused = [row for row in rows if not row["ok"]]
    assert refused
    for row in refused:
        ranks = f"trainer.devices={there.gpus or 2}"
        with pytest.raises(ConfigError) as error:
            check(
                compose(f"dispatcher={row['dispatcher']}", f"dispatcher.transport={row['transport']}", ranks),
                device_count=there.gpus,
            )
        assert f": {row['why']}; expected" in str(error.value)
        assert str(error.value).endswith(f"; {row['fix']}")


def test_the_words_are_printed(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert doctor.main([], machine=MACHINES["h100_bare"]) == 0
    printed = capsys.readouterr().out
    for row in doctor.dispatcher_rows(MACHINES["h100_bare"]):
        assert row.why in printed and row.fix in printed
    assert "8 (NVIDIA H100 80GB HBM3), compute capability 9.0" in printed
    assert "nvidia-nccl-cu13 2.29.7" in printed


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_it_is_readable_at_every_width(
    columns: int, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert doctor.main([], machine=MACHINES["h100_bare"]) == 0
    printed = capsys.readouterr().out
    fits = columns if columns >= 60 else 53  # a row of the dispatchers' columns
    assert max(map(len, printed.splitlines())) <= fits
    assert "…" not in printed
    words = " ".join(printed.split())
    for row in doctor.dispatcher_rows(MACHINES["h100_bare"]):
        assert " ".join(row.why.split()) in words and row.fix in words
    assert all(name in printed for name in names("overlap") | names("dispatcher"))


def test_it_looks_at_this_machine_without_torch(tmp_path: Path):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['doctor.py', '--json', {str(tmp_path / 'doctor.json')!r}]\n"
        f"try:\n    runpy.run_path({str(REPOSITORY / 'scripts' / 'doctor.py')!r}, run_name='__main__')\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert found["machine"]["torch"] == torch.__version__


def test_it_says_for_every_combination_whether_a_step_graph_can_capture_it(tmp_path: Path):
    rows = tables(LAPTOP, tmp_path / "doctor.json")["graphs"]
    assert {row["overlap"] for row in rows} == names("overlap")
    assert {row["fusion"] for row in rows} == names("fusion")
    assert {row["dispatcher"] for row in rows} == names("dispatcher")
    captured = {(row["dispatcher"], row["sizes"]) for row in rows if row["ok"]}
    exact = {"local", "none"}
    assert captured == {(name, "budget") for name in names("dispatcher") - exact} | {
        (n, "exact") for n in exact
    }
    fused = {(row["dispatcher"], row["overlap"]) for row in rows if row["ok"] and row["fusion"] == "mega"}
    assert fused == {("none", name) for name in names("overlap") - {"chunked"}}
    assert all(row["fusion"] in ("grouped", "mega") for row in rows if row["ok"])
    assert all(row["why"] and row["fix"].startswith("set ") for row in rows if not row["ok"])


@pytest.mark.parametrize("sizes", [None, 1.5])
@pytest.mark.parametrize("fusion", ["loop", "grouped"])
def test_the_config_says_the_same_about_step_graphs(sizes: float | None, fusion: str, tmp_path: Path):
    rows = tables(LAPTOP, tmp_path / "doctor.json")["graphs"]
    (row,) = [
        row
        for row in rows
        if (row["dispatcher"], row["sizes"], row["fusion"], row["overlap"])
        == ("nccl_ep", "budget" if sizes else "exact", fusion, "none")
    ]
    options = ["dispatcher=nccl_ep", f"fusion={fusion}", "graph=step"]
    options += [f"dispatcher.capacity_factor={sizes}"] if sizes else []
    if row["ok"]:
        compose_run(options, world=2)
    else:
        with pytest.raises(ConfigError) as refused:
            compose_run(options, world=2)
        assert row["why"] in str(refused.value) and row["fix"] in str(refused.value)
