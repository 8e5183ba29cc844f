"""scripts/check_cluster.py: what it would check where, that its checks can fail, a run on two CPU ranks, its page."""

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path

import pytest

from sidestream.config.availability import LIBRARIES, Machine
from sidestream.dispatch import packed
from sidestream.measure import cluster
from sidestream.measure.cluster import SIZES, arms_to_time, plan_checks, run_plain
from tests.config.machines import H100, H100_BARE, LAPTOP
from tests.docs.pages import REPOSITORY, blocks, commands, script
from tests.rank_pool import ranks

CONF = REPOSITORY / "conf"
PAGES = [REPOSITORY / "docs" / name for name in ("dispatch_benchmark.md", "library_benchmark.md")]
MODES = ("exact", "static", "overflow")
ON_TORCH = {"allgather", "alltoall", "deep_ep", "hybrid_ep", "nccl_ep"}
check_cluster = script("scripts/check_cluster.py")
bench_dispatch = script("scripts/bench_dispatch.py")


@pytest.mark.parametrize(
    ("machine", "libraries"), [(LAPTOP, set()), (H100_BARE, set()), (H100, {"nccl_ep", "deep_ep"})]
)
def test_what_would_be_checked_where(
    machine: Machine, libraries: set[str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(check_cluster, "run", lambda *_, **__: pytest.fail("something was started"))
    monkeypatch.setenv("COLUMNS", "300")
    assert check_cluster.main(["--list", "--ranks", "8"], machine=machine) == 0
    printed = capsys.readouterr().out
    rows = plan_checks(CONF, machine=machine, ranks=8)
    moving = {path.stem for path in (CONF / "dispatcher").glob("*.yaml")} - {"none"}
    assert {row.dispatcher for row in rows} == moving
    runs = {
        transport: {row.dispatcher for row in rows if row.transport == transport and not row.why}
        for transport in ("library", "torch")
    }
    assert runs == {"library": libraries, "torch": ON_TORCH}
    for row in rows:
        assert bool(row.why) == (row.mode == "all") and row.dispatcher in printed
    skipped = {row.dispatcher: row.why for row in rows if row.transport == "library" and row.why}
    assert skipped.keys() == set(LIBRARIES) - libraries
    assert all(why.split(";")[0] in printed for why in skipped.values())
    static = {(row.mode, row.size) for row in rows if row.dispatcher == "alltoall"}
    assert static == {(mode, size) for mode in MODES for size in SIZES}
    assert f"8 ranks on {machine.device_type}; real shape " in printed


def test_only_what_is_asked_for(capsys: pytest.CaptureFixture):
    rows = plan_checks(CONF, machine=LAPTOP, ranks=1, only=["local"])
    assert [(row.mode, row.arm, row.why) for row in rows] == [("exact", "local", "")] * 2
    assert check_cluster.main(["--list", "--only", "deepep"], machine=LAPTOP) == 1
    assert "error: only=deepep: expected any of allgather, alltoall" in capsys.readouterr().err


def job(tmp_path: Path, *only: str) -> dict:
    checks = plan_checks(CONF, machine=LAPTOP, ranks=2, only=only)
    return {
        "checks": [asdict(check) for check in checks if check.size != "real"],
        "real": {**asdict(cluster.small_shape(2)), "name": "real"},
        "dtype": "fp32",
        "rounds": 0,
        "warmup": 0,
        "seed": 1,
        "conf": str(CONF),
        "progress": str(tmp_path / "progress.json"),
    }


def with_fault(rank: int, world: int, plain: dict, fault: str | None) -> list[dict]:
    """`row`: rows come back wrong. `lost`: routes that are lost are not counted."""
    right, kept = packed.sum_routes, packed.RowCounter.note

    def wrong_rows(rows, layout, *, top_k):
        return right(rows, layout, top_k=top_k).roll(1, 0)

    if fault == "row":
        packed.sum_routes = wrong_rows
    elif fault == "lost":
        packed.RowCounter.note = lambda *_, **__: None
    try:
        return run_plain(plain, say=lambda _: None)
    finally:
        packed.sum_routes, packed.RowCounter.note = right, kept


def states(tmp_path: Path, fault: str | None, *only: str) -> dict[tuple[str, str], tuple[str, str]]:
    plain = job(tmp_path, *only)
    (record,), (other,) = ranks(2).run(with_fault, plain=plain, fault=fault)
    assert [row["state"] for row in record["checks"]] == [row["state"] for row in other["checks"]]
    assert json.loads((tmp_path / "progress.json").read_text())["checks"] == record["checks"]
    return {(row["transport"], row["mode"]): (row["state"], row["detail"]) for row in record["checks"]}


def test_a_right_dispatcher_passes(tmp_path: Path):
    found = states(tmp_path, None, "nccl_ep")
    assert found["library", "all"][0] == "skipped"
    assert {found["torch", mode][0] for mode in MODES} == {"ok"}
    assert re.fullmatch(r"largest error \d\.\de-0[678] in fp32", found["torch", "exact"][1])
    assert "routes lost as agreed" in found["torch", "overflow"][1]


def test_wrong_rows_and_wrong_counts_are_found(tmp_path: Path):
    found = states(tmp_path, "row", "alltoall")
    assert {state for state, _ in found.values()} == {"failed"}
    assert "relative error of output" in found["torch", "exact"][1]
    found = states(tmp_path, "lost", "alltoall")
    assert [found["torch", mode][0] for mode in MODES] == ["ok", "ok", "failed"]
    assert "routes do not fit" in found["torch", "overflow"][1]


def test_the_libraries_are_timed_first_and_only_what_passed():
    def rows(dispatcher, transport, arm, *states):
        return [
            {"dispatcher": dispatcher, "transport": transport, "mode": mode, "arm": arm, "state": state}
            for mode, state in zip(MODES, states)
        ]

    found = arms_to_time(
        [
            *rows("alltoall", "torch", "alltoall", "ok", "ok", "ok"),
            *rows("deep_ep", "library", "deep_ep,dispatcher.transport=library", "ok", "failed", "ok"),
            *rows("deep_ep", "torch", "deep_ep,dispatcher.transport=torch", "ok", "ok", "ok"),
            *rows("nccl_ep", "library", "nccl_ep,dispatcher.transport=library", "ok", "ok", "ok"),
            *rows("nccl_ep", "torch", "nccl_ep,dispatcher.transport=torch", "ok", "ok", "ok"),
        ]
    )
    library = "nccl_ep,dispatcher.transport=library"
    torch_arm = "deep_ep,dispatcher.transport=torch"
    assert found == [library, torch_arm, "alltoall", f"{library},dispatcher.capacity_factor=1.25"]


@pytest.mark.full
@pytest.mark.shell
def test_two_cpu_ranks_with_one_command(tmp_path: Path, capfd: pytest.CaptureFixture):
    out = tmp_path / "cluster.json"
    words = ["--ranks", "2", "--only", "nccl_ep", "--real", "64,64,32,8,2", "--rounds", "1"]
    assert check_cluster.main([*words, "--warmup", "0", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert {row["state"] for row in result["checks"] if row["transport"] == "torch"} == {"ok"}
    assert (result["status"], result["world_size"], result["transport"]) == ("finished", 2, ["torch"])
    assert [record["routing"]["kind"] for record in result["results"]] == ["uniform", "zipf"]
    assert out.with_suffix(".png").stat().st_size > 5000
    printed = capfd.readouterr().out
    assert "ran on cpu with torch.distributed: nccl_ep" in printed
    assert "NOT run with their libraries: nccl_ep" in printed


def test_the_commands_of_the_pages_are_legal():
    """Those under torchrun too, which the other pages do not have for scripts."""
    seen = set()
    for block in [
        block for page in PAGES for language in ("bash", "text") for block in blocks(page, language)
    ]:
        for program, *rest in commands(block):
            if program == "torchrun":
                assert rest.pop(0) == "--nproc-per-node" and rest.pop(0).isdigit()
            else:
                assert program == "python"
            name, *words = rest
            module = {"scripts/check_cluster.py": check_cluster, "scripts/bench_dispatch.py": bench_dispatch}[
                name
            ]
            options = module.arguments(words)
            if module is bench_dispatch and not options.merge:
                bench_dispatch.check_names(options)
                bench_dispatch.parse_shapes(options.shapes)
            seen.add((program, name, bool(getattr(options, "merge", None))))
    assert len(seen) == 5, shlex.join(map(str, seen))
