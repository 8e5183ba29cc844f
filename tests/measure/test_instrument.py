"""What all benchmarks share: the head of a record, its files, the facts on a page, names beside bars."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sidestream.measure import dispatch_report, graph_report, instrument, report
from sidestream.report.table import Table

RESULTS = Path(__file__).parents[2] / "docs" / "results"
HEAD = ("schema_version", "benchmark", "command", "started", "cpu", "cpu_count", "python", "platform")


def test_a_record_has_a_head_from_before_and_the_load_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([(1.0, 1.0, 1.0), (2.0, 2.0, 2.0)])
    monkeypatch.setattr(instrument.os, "getloadavg", lambda: next(loads))
    head = instrument.begin("layer", command="python x.py", packages=("torch", "nothing-of-this-name"))
    found = instrument.end(head, rounds=3)
    assert {*HEAD, "status", "commit", "dirty", "versions", "load_average"} < found.keys()
    assert found["load_average"] == {"before": [1.0] * 3, "after": [2.0] * 3} and found["rounds"] == 3
    assert found["versions"]["torch"] and found["versions"]["nothing-of-this-name"] is None
    assert instrument.load(found) == "Load average 1.0 before, 2.0 after."
    assert "after" not in head["load_average"]


@pytest.mark.parametrize("name", ["bench_layer", "bench_fusion_bf16", "bench_graph"])
def test_committed_records_have_the_head_too(name: str) -> None:
    assert set(HEAD) < json.loads((RESULTS / f"{name}.json").read_text()).keys()


def test_a_record_is_written_with_its_picture_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    result = json.loads((RESULTS / "bench_layer.json").read_text())
    out = tmp_path / "new" / "layer.json"
    instrument.write(result, out, report.print_tables, report.draw)
    assert json.loads(out.read_text()) == result
    with Image.open(out.with_suffix(".png")) as image:
        assert image.size[0] > 1000
    printed = capsys.readouterr().out
    assert "sidestream/alltoall+grouped" in printed and f"{out} {out.with_suffix('.png')}" in printed


def test_without_a_file_the_tables_are_shown_only(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    instrument.write({}, None, lambda result, to: Table(["a"], [["b"]]).show(to))
    assert "b" in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.parametrize("module", [report, dispatch_report, graph_report])
def test_a_page_says_how_and_where_it_was_measured_and_what_was_emulated(module: Any) -> None:
    names = {report: "bench_layer", dispatch_report: "bench_dispatch", graph_report: "bench_graph"}
    result = json.loads((RESULTS / f"{names[module]}.json").read_text())
    text = module.markdown(result)
    for begin in ("* Command", "* Machine: ", "* Commit `", "* Emulated: "):
        assert any(line.startswith(begin) for line in text.splitlines()), begin


def test_bars_have_names_where_they_are_others_than_those_of_the_first() -> None:
    records = [{"names": names} for names in (["a", "b"], ["a", "b"], ["b"])]

    def draw(axes: Any, record: dict[str, Any]) -> None:
        axes.barh(range(len(record["names"])), [1.0] * len(record["names"]))

    figure = instrument.bars(
        [records], draw, names=lambda record: record["names"], title="t", width_in=2, height_in=1
    )
    labels = [[label.get_text() for label in axes.get_yticklabels()] for axes in figure.axes]
    assert labels == [["a", "b"], ["", ""], ["b"]]
