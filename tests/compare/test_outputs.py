"""The script and its four files: titles, the table, one page without a network."""

import csv
import html
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from sidestream.compare import charts, outputs
from tests.compare.folders import write_run, write_sweep
from tests.docs.pages import REPOSITORY, script

compare = script("scripts/compare.py")
NAMES = ["compare.csv", "compare.html", "compare.md", "compare.png"]


class Tags(HTMLParser):
    """All tags of a page, and those that are open at its end."""

    void = {"meta", "img", "link", "br", "rect", "line", "polyline", "polygon"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_sweep_gets_its_four_files(tmp_path: Path, capsys: pytest.CaptureFixture):
    write_sweep(tmp_path, overlaps=("none", "shortcut"))
    write_run(tmp_path / "9", status="failed")
    assert compare.main([str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == NAMES
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["Comparison of overlap", "left out: 9: status failed: ValueError: it broke"]
    text = (tmp_path / "compare.md").read_text()
    assert text.startswith("# Comparison of overlap\n")
    assert (
        "| overlap=none (baseline) | torch (native, 2 \u00d7 cpu, EP 2) | 10,000 | 10.0 (9.50 to 10.5) | 2.00 (25 %) |"
        in text
    )
    assert "| overlap=shortcut † |" in text and "| \u22120.0700 (\u22120.0948 to \u22120.0452) |" in text
    assert "* `9`: status failed: ValueError: it broke" in text


def test_the_csv_has_plain_numbers(tmp_path: Path):
    compare.main([str(write_sweep(tmp_path))])
    with (tmp_path / "compare.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["arm"] for row in rows] == ["overlap=none", "overlap=chunked"]
    assert {row["title"] for row in rows} == {"Comparison of overlap"}
    asked = {
        "transport": "torch",
        "link": "native",
        "device": "cpu",
        "world_size": "2",
        "replays": "6",
        "dropped": "9",
    }
    assert asked.items() <= rows[0].items()
    assert float(rows[1]["val_loss_difference"]) == pytest.approx(-0.07)


def test_a_declared_difference_is_in_the_title_of_every_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_run(tmp_path / "0")
    write_run(tmp_path / "1", choices={"overlap": "chunked"}, result={"transport": "nccl_ep"})
    assert compare.main([str(tmp_path)]) == 2
    assert not (tmp_path / "compare.md").exists()
    drawn = []
    original = charts.picture
    monkeypatch.setattr(charts, "picture", lambda *args: drawn.append(original(*args)) or drawn[-1])
    assert compare.main([str(tmp_path), "--differ", "transport"]) == 0
    title = "Comparison of overlap; the runs also differ in transport (torch, nccl_ep)"
    assert (tmp_path / "compare.md").read_text().startswith(f"# {title}\n")
    assert (tmp_path / "compare.csv").read_text().splitlines()[1].startswith(f'"{title}"')
    assert " ".join(drawn[0].get_suptitle().split()) == title
    page = (tmp_path / "compare.html").read_text()
    assert f"<title>{title}</title>" in page
    heading = re.search(r"<h1>(.*?)</h1>", page).group(1)
    assert html.unescape(re.sub(r"<.*?>", "", heading)) == title


def test_the_page_is_whole_and_asks_for_nothing(tmp_path: Path):
    write_sweep(tmp_path, overlaps=("none", "shortcut"))
    for folder in tmp_path.iterdir():
        (folder / "overlap.png").write_bytes(b"\x89PNG")
    compare.main([str(tmp_path)])
    page = (tmp_path / "compare.html").read_text()
    tags = Tags(page)
    assert tags.open == []
    for tag, attributes in tags.seen:
        assert tag != "link"
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:").startswith("data:"), (tag, attributes)
    assert not re.search(r"https?://", page)
    images = [attributes for tag, attributes in tags.seen if tag == "img" and "src" in attributes]
    assert [image["alt"] for image in images] == [
        "Timeline of overlap=none",
        "Timeline of overlap=shortcut",
        "Load of the experts of overlap=none",
        "Load of the experts of overlap=shortcut",
    ]
    assert sum(tag == "svg" for tag, _ in tags.seen) == 6
    # The curves as numbers: mean, and from the lowest to the highest seed.
    numbers = re.search(r"<details>.*?</details>", page, re.DOTALL).group()
    assert "4.5200" in numbers and "4.5100 to\u00a04.5300" in numbers


def test_names_of_runs_cannot_break_the_page(tmp_path: Path):
    write_sweep(tmp_path)
    write_run(tmp_path / "<script>alert(1)<", status="failed", result={"error": "<b>|"})
    compare.main([str(tmp_path)])
    page = (tmp_path / "compare.html").read_text()
    assert "<script>alert" not in page and "&lt;script&gt;alert(1)&lt;" in page
    assert Tags(page).open == []


def test_the_picture_is_one(tmp_path: Path):
    compare.main([str(write_sweep(tmp_path)), "--out", str(tmp_path / "out")])
    with Image.open(tmp_path / "out" / "compare.png") as image:
        assert image.size[0] == 1440


def test_a_picture_that_fails_leaves_no_half_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_sweep(tmp_path)

    def broken(*_):
        raise RuntimeError("no picture")

    monkeypatch.setattr(outputs.charts, "picture", broken)
    with pytest.raises(RuntimeError):
        compare.main([str(tmp_path)])
    assert not list(tmp_path.glob("compare.*"))


def test_refusals_are_printed_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture):
    write_run(tmp_path / "0")
    write_run(tmp_path / "1", seed=2, choices={"overlap": "chunked"}, result={"transport": "nccl_ep"})
    assert compare.main([str(tmp_path)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [line.partition("=")[0] for line in errors] == ["error: transport", "error: seeds"]
    assert not list(tmp_path.glob("compare.*"))


def test_runs_without_losses_loads_and_times_have_a_page_too(tmp_path: Path):
    for number, overlap in enumerate(("none", "chunked")):
        write_run(
            tmp_path / str(number),
            choices={"overlap": overlap},
            config={"measure.rounds": 3},
            result={"metrics": {}, "overflow": {}},
            picture="overlap.svg",
        )
        (tmp_path / str(number) / "metrics.jsonl").unlink()
    assert compare.main([str(tmp_path)]) == 0
    text = (tmp_path / "compare.md").read_text()
    assert "| choices | transport, link, ranks | exposed, ms | E_hide |" in text
    page = (tmp_path / "compare.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 2 and "Loss over tokens" not in page


@pytest.mark.parametrize("arguments", [[], ["--wandb", "a/b"], ["x", "--group", "g"]])
def test_arguments_that_do_not_fit(arguments: list[str]):
    with pytest.raises(SystemExit) as ended:
        compare.main(arguments)
    assert ended.value.code == 2


def test_several_folders_are_written_to_a_folder_of_their_own():
    assert compare.default_out([Path("a")]) == Path("a")
    assert compare.default_out([Path("a"), Path("b")]) == compare.default_out([]) == Path("compare")


def test_it_needs_no_torch_and_matplotlib_only_to_draw():
    code = (
        "import sys, sidestream.compare.outputs, sidestream.compare.wandb_runs\n"
        "assert not {'torch', 'lightning', 'matplotlib', 'wandb'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=REPOSITORY)
