"""README, benchmark page and picture show what is in docs/results/; tools/render_readme.py takes whole runs only."""

import json
import os
from pathlib import Path

import pytest

from sidestream.tracking.result import RunResult
from tests.docs.pages import README, script, text

render_readme = script("tools/render_readme.py")
quality = render_readme.quality


def test_the_table_is_the_one_of_the_committed_run_and_the_sentence_of_the_committed_overlap():
    assert render_readme.render(text(README)) == text(README), "run `make readme`"


def test_the_sentence_and_the_picture_of_the_overlap_follow_its_file(tmp_path: Path, monkeypatch):
    measured = json.loads(text(render_readme.SHORTCUT_RESULT))
    both = measured["passes"]["both"]
    both["ms"]["serial"]["median"], both["ms"]["overlapped"]["median"], both["reached"] = 300.4, 200.2, 0.954
    monkeypatch.setattr(render_readme, "SHORTCUT_RESULT", tmp_path / "overlap.json")
    render_readme.SHORTCUT_RESULT.write_text(json.dumps(measured))
    shown = render_readme.render(text(README))
    assert "serial 300 ms, overlapped 200 ms](docs/overlap_shortcut.png)" in shown
    assert "300 ms become 200 ms (1.50 x), 95 % of what this schedule can gain" in shown
    both["reached"] = 1.02  # noise
    assert ", all of what this schedule can gain" in render_readme.overlap_in_short(measured)
    render_readme.draw_overlap(tmp_path / "overlap.png")
    new, committed = (
        render_readme.drawn_digest(p) for p in (tmp_path / "overlap.png", render_readme.SHORTCUT_PICTURE)
    )
    assert new == render_readme.data_digest(render_readme.SHORTCUT_RESULT) != committed


def test_the_benchmark_table_is_the_one_of_the_committed_measurement():
    page = text(render_readme.BENCHMARK)
    assert render_readme.render_benchmark(page) == page, "run `make readme`"
    result = json.loads(text(render_readme.BENCHMARK_RESULT))
    assert (result["status"], result["frozen_rounds"]) == ("finished", 0)
    assert result["peers"] == ["transformers", "torchtitan", "megatron_alltoall", "megatron_allgather"]


def test_the_overlap_table_is_the_one_of_the_committed_measurement():
    page = text(render_readme.OVERLAP)
    assert render_readme.render_overlap(page) == page, "run `make readme`"
    runs = json.loads(text(render_readme.OVERLAP_RESULT))["runs"]
    # What docs/overlap.md says of them: the share of each schedule's own bound.
    assert min(run["reached"] for run in runs if run["compute"] == "sleep") >= 0.9
    assert min(run["reached"] for run in runs if run["compute"] == "real") >= 0.8


def test_the_graph_table_is_the_one_of_the_committed_measurement():
    page = text(render_readme.GRAPH)
    assert render_readme.render_graph(page) == page, "run `make readme`"
    for record in json.loads(text(render_readme.GRAPH_RESULT))["results"]:
        memory = record["peak_memory_bytes"]
        assert record["speedup"]["median"] >= 1.0 and memory["graph"] <= 2 * memory["eager"]


def test_the_quality_table_is_the_one_of_the_committed_study():
    page = text(render_readme.QUALITY)
    assert render_readme.render_quality(page) == page, "run `make readme`"
    study = json.loads(text(render_readme.QUALITY_RESULT))
    # What the page says of it in words: the claim that was planned is not shown, for either tap.
    for arm in ("scmoe_pos1", "scmoe_pos2"):
        assert quality.not_worse(quality.difference(study, arm)) is False
    assert "**Not shown.**" in page


def test_the_tables_of_a_resume_are_those_of_the_contract():
    page = text(render_readme.RESUME)
    assert render_readme.render_resume(page) == page, "run `make readme`"


def test_the_fusion_tables_are_those_of_the_committed_measurements():
    page = text(render_readme.FUSION)
    assert render_readme.render_fusion(page) == page, "run `make readme`"


def test_the_predictor_tables_are_those_of_the_committed_residuals():
    page = text(render_readme.PREDICTOR)
    assert render_readme.render_predictor(page) == page, "run `make readme`"


def test_the_pictures_show_what_is_committed():
    digest = render_readme.drawn_digest
    assert digest(render_readme.PICTURE) == render_readme.data_digest(), "run `make readme`"
    overlap = render_readme.data_digest(render_readme.SHORTCUT_RESULT)
    assert digest(render_readme.SHORTCUT_PICTURE) == overlap, "run `make readme`"


def test_the_committed_run_is_a_default_run_that_finished():
    result = json.loads(text(render_readme.RESULT))
    assert (result["status"], result["command"]) == ("finished", "python train.py")
    assert result.keys() <= RunResult(status="finished").as_dict().keys()
    assert result["metrics"]["val_loss"] < 1.8 < result["metrics"]["baselines"]["trigram"]
    last = json.loads(text(render_readme.METRICS).splitlines()[-1])
    assert last["val/loss"] == result["metrics"]["val_loss"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder made of the committed files; what the script writes goes to `tmp_path` too."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "result.json").write_bytes(render_readme.RESULT.read_bytes())
    (folder / "metrics.jsonl").write_bytes(render_readme.METRICS.read_bytes())
    machine = json.loads(text(render_readme.MACHINE))
    env = {**machine, "started": "2026-01-01T00:00:00+00:00", "cpu": "Some CPU", "previous": []}
    (folder / "env.json").write_text(json.dumps(env))
    os.utime(folder / "result.json", times=(1767225600 + 77, 1767225600 + 77))
    (tmp_path / "README.md").write_text(text(README))
    (tmp_path / "layer_benchmark.md").write_text(text(render_readme.BENCHMARK))
    monkeypatch.setattr(render_readme, "BENCHMARK", tmp_path / "layer_benchmark.md")
    for name in ("RESULT", "METRICS", "MACHINE"):
        monkeypatch.setattr(render_readme, name, tmp_path / getattr(render_readme, name).name)
    monkeypatch.setattr(render_readme, "README", tmp_path / "README.md")
    monkeypatch.setattr(render_readme, "PICTURE", tmp_path / "loss.png")
    monkeypatch.setattr(render_readme, "SHORTCUT_PICTURE", tmp_path / "overlap_shortcut.png")
    return folder


def test_a_run_is_taken_and_shown(run: Path, tmp_path: Path):
    result = json.loads((run / "result.json").read_text())
    result["metrics"]["val_loss"] = 1.25
    result["link"] = "throttled"
    times = (run / "result.json").stat().st_mtime
    (run / "result.json").write_text(json.dumps(result))
    os.utime(run / "result.json", times=(times, times))
    assert render_readme.main(["--run", str(run)]) == 0
    shown = (tmp_path / "README.md").read_text()
    assert "| validation loss | **1.250** nats per byte" in shown
    assert "| emulated | the wire (link=throttled) |" in shown
    assert "| hardware | Some CPU, " in shown
    assert "| time | 77 s from start to result |" in shown
    assert render_readme.drawn_digest(tmp_path / "loss.png") == render_readme.data_digest()
    assert render_readme.render(shown) == shown


@pytest.mark.parametrize("change", ["failed", "resumed", "absent"])
def test_half_a_run_is_refused(run: Path, change: str, capsys: pytest.CaptureFixture):
    for name, change_of, key, value in (
        ("result", "failed", "status", "failed"),
        ("env", "resumed", "previous", [{}]),
    ):
        if change == change_of:
            path = run / f"{name}.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    before = render_readme.README.read_text()
    assert render_readme.main(["--run", str(run / "x" if change == "absent" else run)]) == 2
    assert capsys.readouterr().err.startswith(f"error: run={run}")
    assert render_readme.README.read_text() == before
    assert not render_readme.RESULT.exists()


def test_a_readme_without_the_marks_is_refused():
    with pytest.raises(ValueError, match=r"README\.md: no "):
        render_readme.render("# Sidestream\n")
