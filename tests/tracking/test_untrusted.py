"""Files that anybody may have written: regular, inside their folder, bounded, and shown without being obeyed."""

import os
from pathlib import Path

import pytest

from sidestream.tracking import untrusted
from sidestream.tracking.untrusted import Unreadable, printable


def test_an_ordinary_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": 1}')
    (tmp_path / "a.yaml").write_text("a: [1, {b: 2}]\n")
    assert untrusted.read_json(tmp_path / "a.json", inside=tmp_path) == {"a": 1}
    assert untrusted.read_yaml(tmp_path / "a.yaml", inside=tmp_path) == {"a": [1, {"b": 2}]}


@pytest.mark.timeout(20)
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Unreadable, match="not a regular file"):
        untrusted.read_bytes(tmp_path / "pipe")


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "loop", "folder", "missing"])
def test_what_is_no_file_inside_is_refused(tmp_path: Path, target: str) -> None:
    inside = tmp_path / "run"
    (inside / "folder").mkdir(parents=True)
    (tmp_path / "outside").write_text("secret")
    (inside / "loop").symlink_to(target)
    with pytest.raises(Unreadable):
        untrusted.read_text(inside / "loop", inside=inside)


def test_a_link_inside_the_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text")
    (tmp_path / "b").symlink_to("a")
    assert untrusted.read_text(tmp_path / "b", inside=tmp_path) == "text"


def test_a_large_file_is_refused_and_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)  # a hole: nothing on the disk
    with pytest.raises(Unreadable, match="larger than 1,000 bytes"):
        untrusted.read_bytes(tmp_path / "large", limit=1000)


@pytest.mark.timeout(20)
def test_a_large_file_of_lines_is_refused_and_not_read(tmp_path: Path) -> None:
    """One line without an end, as a hole of a tebibyte is, was read to its end."""
    with (tmp_path / "large.jsonl").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(Unreadable, match="larger than 1,073,741,824 bytes"):
        untrusted.read_records(tmp_path / "large.jsonl")


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [1]\nb: *a\n",
        "a: !!python/object/apply:os.system [touch x]\n",
        "- a\n",
        "a: [1",
        "[" * 5000,
        "a: " + "{a: " * 5000,
        "",
    ],
)
def test_what_is_no_plain_yaml_mapping_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(Unreadable):
        untrusted.read_yaml(tmp_path / "a.yaml")


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, "\x00", "1", '{"a": 1}{'])
def test_what_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(Unreadable):
        untrusted.read_json(tmp_path / "a.json")


def test_what_is_shown_is_one_line_without_controls() -> None:
    shown = printable("a\x1b[2Jb\nc\x9bd\u202ee\u2028f\ttext é 日本")
    assert shown == r"a\x1b[2Jb\nc\x9bd\u202ee\u2028f\ttext é 日本"
    assert len(printable("x" * 10_000)) == 300
