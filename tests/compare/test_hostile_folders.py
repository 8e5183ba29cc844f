"""Run folders that somebody else wrote: what can be read is read, what cannot is one line, nothing leaves its place."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sidestream.compare import outputs
from sidestream.compare.arms import compare
from sidestream.compare.errors import CompareError
from sidestream.compare.runs import read_folders
from sidestream.tracking import spreadsheet
from sidestream.tracking.folder import RunFolder
from sidestream.tracking.sweep import read_table
from tests.compare.folders import write_run, write_sweep
from tests.docs.pages import script

pytestmark = pytest.mark.timeout(60)


def put(name: str, text: str | bytes) -> Callable[[Path], None]:
    content = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / name).write_bytes(content) and None


def fifo(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def link(name: str, to: str = "/etc/passwd") -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(to)

    return make


def result(key: str, value: object) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        content = json.loads((folder / "result.json").read_text())
        *parts, last = key.split(".")
        place = content
        for part in parts:
            place = place[part]
        place[last] = value
        (folder / "result.json").write_text(json.dumps(content))

    return make


BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"
DEEP = "[" * 50_000 + "]" * 50_000
LEFT_OUT = {
    "a pipe for metrics": (fifo("metrics.jsonl"), "metrics.jsonl: not a regular file"),
    "a pipe for loads": (fifo("expert_load.jsonl"), "expert_load.jsonl: not a regular file"),
    "a pipe for the result": (fifo("result.json"), "result.json: not a regular file"),
    "a pipe for the config": (fifo(".hydra/resolved.yaml"), "resolved.yaml: not a regular file"),
    "aliases": (put(".hydra/resolved.yaml", BOMB), "aliases are not read"),
    "a tag": (
        put(".hydra/resolved.yaml", "a: !!python/object/apply:os.system [ls]"),
        "resolved.yaml: no YAML",
    ),
    "a list for a config": (put(".hydra/resolved.yaml", "- 1\n"), "expected an object, found list"),
    "half a config": (put(".hydra/resolved.yaml", "a: [1"), "resolved.yaml: no YAML"),
    "a list for a result": (put("result.json", "[]"), "expected an object, found list"),
    "depth": (put("result.json", DEEP), "result.json: no JSON"),
    "no text": (put("result.json", b"\xff\xfe{}"), "result.json: not UTF-8"),
    "a link out": (link("result.json"), "result.json: leads out of its folder"),
    "metrics elsewhere": (link("metrics.jsonl"), "metrics.jsonl: leads out of its folder"),
    "a list for metrics": (result("metrics", []), "result.json: metrics is no object"),
    "text for a number": (result("metrics.tokens_per_second", "fast"), 'metrics.tokens_per_second is "fast"'),
    "infinity": (put("result.json", '{"status": "finished", "world_size": 1e999}'), "world_size is Infinity"),
    "numbers for choices": (result("choices", {"overlap": [1]}), "result.json: choices is "),
    "a list for choices": (result("choices", ["overlap"]), "result.json: choices is "),
    "text for a seed": (result("seed", "1"), 'result.json: seed is "1"'),
    "an object for a commit": (result("commit", {}), "result.json: commit is {}"),
    "an unknown status": (result("status", "\x1b[31m"), "result.json: status is "),
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_a_run_that_cannot_be_read_is_left_out_with_a_line(tmp_path: Path, what: str) -> None:
    write_sweep(tmp_path / "s", seeds=(1,))
    spoil, told = LEFT_OUT[what]
    spoil(write_run(tmp_path / "s" / "bad", seed=9, choices={"overlap": "two_batch"}, load=True))
    runs, left_out = read_folders([tmp_path / "s"])
    assert len(runs) == 2
    (item,) = left_out
    assert item.name == "bad" and told in item.reason and item.reason.isprintable() and len(item.reason) < 400


GOOD = b'{"step": 5, "progress/tokens": 500, "val/loss": 3.0}\n'
SKIPPED = {
    "broken line": (put("metrics.jsonl", GOOD + b"{,\n"), "line 2"),
    "NULs": (put("metrics.jsonl", GOOD + b"\0\0\0\n\0"), "line 2"),
    "no objects": (put("metrics.jsonl", b"1\n[]\n" + GOOD), "2 lines"),
    "no step": (put("metrics.jsonl", b'{"step": "5"}\n' + GOOD), "step"),
    "a long line": (put("metrics.jsonl", b'{"x": "' + b"y" * (2 << 20) + b'"}\n' + GOOD), "line 1"),
    "env": (put("env.json", "{"), "env.json: no JSON"),
    "a pipe for env": (fifo("env.json"), "env.json: not a regular file"),
}


@pytest.mark.parametrize("what", SKIPPED)
def test_what_can_be_read_is_and_the_rest_is_told(tmp_path: Path, what: str) -> None:
    spoil, told = SKIPPED[what]
    spoil(write_run(tmp_path / "a"))
    write_run(tmp_path / "b", choices={"overlap": "chunked"}, env={"cpu": None} if "env" in what else None)
    runs, left_out = read_folders([tmp_path])
    assert len(runs) == 2 and not left_out
    (line,) = runs[0].skipped
    assert told in line and line.startswith(("metrics.jsonl", "env.json"))
    if "env" not in what:
        assert [record["val/loss"] for record in runs[0].metrics] == [3.0]
        assert any(told in note for note in compare(runs).notes)


def test_values_of_another_type_are_no_figures(tmp_path: Path) -> None:
    """Text for a number in a record, a config or env.json: the run is compared without it."""
    for place, overlap in enumerate(("none", "chunked")):
        folder = write_run(
            tmp_path / str(place),
            choices={"overlap": overlap},
            config={"trainer.log_every_n_steps": "5", "link.gbps": "fast"},
            env={"cpu": ["a"]},
        )
        with (folder / "metrics.jsonl").open("a") as file:
            for value in ('"2.5"', "true", "[1]", "1e999", "9" * 400):
                file.write(f'{{"step": 30, "progress/tokens": {value}, "val/loss": {value}}}\n')
        bad = [
            {"step": 1, "steps": 1, "counts": [[1], [2, 3]]},
            {"step": 1, "steps": 1, "counts": [["1"]]},
            {"step": 1, "steps": 5, "counts": [[1]]},
            {"step": 1, "counts": [[1]]},
            {"step": 1, "steps": 1, "counts": 3},
        ]
        (folder / "expert_load.jsonl").write_text("".join(json.dumps(record) + "\n" for record in bad))
    runs, _ = read_folders([tmp_path])
    assert runs[0].load == [] and "cpu" not in runs[0].env
    paths = outputs.write(compare(runs), tmp_path / "out")
    assert all(path.stat().st_size for path in paths)


EVIL = "x|y`z`<img src=x onerror=alert(1)>[a](http://b)\x1b[31m\u202e$\\frac$"


def test_text_of_others_is_text_in_every_output(tmp_path: Path) -> None:
    for place, overlap in enumerate(("none", EVIL)):
        write_run(tmp_path / "s" / str(place), choices={"overlap": overlap}, env={"cpu": EVIL})
    put("result.json", json.dumps({"status": "failed", "error": EVIL}))(write_run(tmp_path / "s" / "9"))
    runs, left_out = read_folders([tmp_path / "s"])
    comparison = compare(runs, left_out=left_out)
    outputs.write(comparison, tmp_path / "out")
    page, told = (tmp_path / "out" / f"compare.{end}" for end in ("html", "md"))
    for path in (page, told):
        text = path.read_text()
        assert "\x1b" not in text and "\u202e" not in text and "<img src=x" not in text
    table = [line for line in told.read_text().splitlines() if line.startswith("|")]
    heads = {line.replace("\\|", "").count("|") for line in table}
    assert len(heads) == 1 and "[a](" not in told.read_text() and "`z`" not in told.read_text()


@pytest.mark.parametrize("picture", ["overlap.svg", "overlap.png"])
@pytest.mark.parametrize("spoil", [link, fifo])
def test_only_pictures_of_the_folder_itself_are_embedded(tmp_path: Path, picture: str, spoil) -> None:
    secret = tmp_path / "secret"
    secret.write_text("root:x:0:0")
    for place, overlap in enumerate(("none", "chunked")):
        folder = write_run(tmp_path / "s" / str(place), choices={"overlap": overlap})
        spoil(picture)(folder) if spoil is fifo else spoil(picture, str(secret))(folder)
    other = write_run(tmp_path / "t" / "2", choices={"overlap": "x"}, config={"measure.out": str(tmp_path)})
    put("overlap.svg", "<svg/>")(tmp_path)
    runs, _ = read_folders([tmp_path / "s"])
    assert [run.picture for run in runs] == [None, None]
    assert read_folders([other])[0][0].picture is None


def test_a_spreadsheet_calculates_nothing() -> None:
    rows = [
        {"=x": '=HYPERLINK("http://a")', "b": "+1+1", "c": "-0.5", "d": -2.5, "e": "@SUM(A1)", "f": " =1", "g": None},
        {"=x": "\t=1", "b": "\r=1", "c": "1e-3", "d": 3, "e": "plain", "f": "-", "g": "two\nlines"},
    ]  # fmt: skip
    head, first, second = csv.reader(io.StringIO(spreadsheet.as_csv(rows)))
    assert head == ["'=x", "b", "c", "d", "e", "f", "g"]
    assert first == ['\'=HYPERLINK("http://a")', "'+1+1", "-0.5", "-2.5", "'@SUM(A1)", "' =1", ""]
    assert second == ["'\\t=1", "'\\r=1", "1e-3", "3", "plain", "'-", "two\\nlines"]


def test_compare_csv_takes_no_formulas(tmp_path: Path) -> None:
    for place, overlap in enumerate(("none", "=cmd|' /C calc'!A0")):
        write_run(tmp_path / str(place), choices={"overlap": overlap})
    runs, _ = read_folders([tmp_path])
    outputs.write(compare(runs), tmp_path / "out")
    rows = list(csv.reader((tmp_path / "out" / "compare.csv").open(newline="")))
    assert not [cell for row in rows for cell in row if cell.startswith(("=", "@", "+"))]
    assert any(cell.startswith("'=cmd") for cell in rows[2])


@pytest.mark.parametrize("name", ["plot_loss", "plot_load"])
@pytest.mark.parametrize("what", [*LEFT_OUT, *SKIPPED])
@pytest.mark.sample(8)
def test_the_scripts_that_draw_a_run_end_with_a_line_too(
    tmp_path: Path, name: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, _ = {**LEFT_OUT, **SKIPPED}[what]
    spoil(write_run(tmp_path / "r", load=True))
    code = script(f"scripts/{name}.py").main([str(tmp_path / "r"), "--out", str(tmp_path / "x.png")])
    err = capsys.readouterr().err
    assert code in (0, 2) and (tmp_path / "x.png").exists() == (code == 0)
    assert len(err.splitlines()) <= 2 and all(
        line.startswith(("error: ", "warning: ")) for line in err.splitlines()
    )


def test_records_are_never_written_through_a_link_or_into_a_pipe(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine\n")
    for spoil in (link("metrics.jsonl", str(target)), fifo("metrics.jsonl")):
        folder = tmp_path / "r"
        folder.mkdir(exist_ok=True)
        spoil(folder)
        with pytest.raises((OSError, ValueError)):
            RunFolder(folder).append_metrics({"step": 1})
        with pytest.raises(ValueError):
            RunFolder(folder).cut_metrics(1)
    assert target.read_text() == "mine\n"


@pytest.mark.parametrize("content", ["{", "[]", '{"command": []}', '{"previous": 3}'])
def test_a_resume_reads_what_it_can_of_an_earlier_env(tmp_path: Path, content: str) -> None:
    put("env.json", content)(tmp_path)
    env = RunFolder(tmp_path, tell=lambda line: None).write_env(command=["x"])
    assert json.loads((tmp_path / "env.json").read_text()) == env and isinstance(env["previous"], list)


@pytest.mark.parametrize("spoil", [fifo("sweep.csv"), link("sweep.csv"), put("sweep.csv", b"a,b\n\0,\xff\n")])
def test_a_table_of_a_sweep_that_cannot_be_read_is_none(tmp_path: Path, spoil) -> None:
    spoil(tmp_path)
    assert read_table(tmp_path) == []


def test_a_folder_with_nothing_that_can_be_read_is_refused_with_its_lines(tmp_path: Path) -> None:
    fifo("metrics.jsonl")(write_run(tmp_path / "a"))
    runs, left_out = read_folders([tmp_path])
    with pytest.raises(CompareError) as refused:
        compare(runs, left_out=left_out)
    assert any("not a regular file" in line for line in refused.value.lines)
