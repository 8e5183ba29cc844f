"""A damaged checkpoint is named with its file, and the newest whole one is taken."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sidestream.config.errors import ConfigError
from sidestream.tracking import integrity
from sidestream.tracking.integrity import Damaged, check_given, newest_whole, verify
from tests.fake_checkpoint import make_checkpoint, seal


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 2, 4 and 8."""
    for step in (2, 4, 8):
        make_checkpoint(tmp_path / "checkpoints" / f"step-{step:08d}")
    return tmp_path


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    shutil.move(path.with_name("moved"), path.parents[2] / "elsewhere")
    path.symlink_to(path.parents[2] / "elsewhere")


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "flipped bits": ("__0_0.distcp", flip, "__0_0.distcp: its content has changed"),
    "flipped bits in meta.pt": ("meta.pt", flip, "meta.pt: its content has changed"),
    "truncated": (
        "__0_0.distcp",
        lambda path: path.write_bytes(b"wei"),
        "__0_0.distcp: 3 bytes instead of 7",
    ),
    "empty": ("__0_0.distcp", lambda path: path.write_bytes(b""), "__0_0.distcp: 0 bytes instead of 7"),
    "without metadata": (".metadata", Path.unlink, ".metadata: missing"),
    "without meta.pt": ("meta.pt", Path.unlink, "meta.pt: missing"),
    "without data": ("__0_0.distcp", Path.unlink, "__0_0.distcp: missing"),
    "one file more": ("__9_0.distcp", Path.touch, "__9_0.distcp: not written with it"),
    "a folder in it": ("more", Path.mkdir, "more: no file"),
    "a pipe in it": ("pipe", os.mkfifo, "pipe: no file"),
    "a link": ("__0_0.distcp", link, "__0_0.distcp: a link"),
    "no manifest": ("manifest.json", Path.unlink, "manifest.json: missing"),
    "half a manifest": ("manifest.json", lambda path: path.write_text('{"sch'), "manifest.json: no JSON"),
    "another manifest": (
        "manifest.json",
        lambda path: path.write_text('{"schema": 9}'),
        "manifest.json: schema 9 is unknown",
    ),
    "nonsense": (
        "manifest.json",
        lambda path: path.write_text('{"schema": 1, "files": [1]}'),
        "manifest.json: no list of files",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_whole_one_is_taken_and_the_damage_is_named(run: Path, damage: str):
    name, harm, why = DAMAGES[damage]
    harm(run / "checkpoints" / "step-00000008" / name)
    choice = newest_whole(run, key="resume")
    assert choice.step == 4
    assert choice.passed == [run / "checkpoints" / "step-00000008"]
    assert choice.lines[0].startswith(f"resume: checkpoints/step-00000008: {why}")
    assert choice.lines[1] == "resume: step-00000004 is the newest whole checkpoint and is taken"
    with pytest.raises(ConfigError, match=r"step-00000008: .*resume.strict"):
        newest_whole(run, key="resume", strict=True)


def test_newer_is_what_has_the_larger_number(tmp_path: Path):
    for step in (9, 10):
        make_checkpoint(tmp_path / "checkpoints" / f"step-{step}")
    assert newest_whole(tmp_path, key="resume").step == 10


def test_of_two_damaged_ones_both_are_named(run: Path):
    flip(run / "checkpoints" / "step-00000008" / "meta.pt")
    (run / "checkpoints" / "step-00000004" / "meta.pt").unlink()
    choice = newest_whole(run, key="resume")
    assert choice.step == 2
    assert [line.split(": ")[1:3] for line in choice.lines[:2]] == [
        ["checkpoints/step-00000008", "meta.pt"],
        ["checkpoints/step-00000004", "meta.pt"],
    ]


def test_without_a_whole_one_each_is_named(run: Path):
    for step in (2, 4, 8):
        flip(run / "checkpoints" / f"step-{step:08d}" / "__0_0.distcp")
    with pytest.raises(ConfigError, match=r"step-00000008: .*; step-00000004: .*; step-00000002: "):
        newest_whole(run, key="run")


def test_a_whole_run_has_nothing_to_say(run: Path):
    for strict in (False, True):
        choice = newest_whole(run, key="resume", strict=strict)
        assert (choice.step, choice.lines, choice.passed) == (8, [], [])


def test_other_names_and_links_are_no_checkpoints(run: Path):
    folder = run / "checkpoints"
    (folder / "step-latest").symlink_to("step-00000008")
    (folder / "step-00000009").symlink_to("step-00000008")
    (folder / "step-").mkdir()
    choice = newest_whole(run, key="resume")
    assert choice.step == 8
    assert [line.removeprefix("resume: checkpoints/") for line in choice.lines[:3]] == [
        "step-: not named step-<number>",
        "step-latest: not named step-<number>",
        "step-00000009: a link",
    ]
    assert [path.name for path in integrity.checkpoints(run)] == [f"step-{step:08d}" for step in (2, 4, 8)]


def test_a_checkpoint_under_another_number_is_damaged(run: Path):
    (run / "checkpoints" / "step-00000008").rename(run / "checkpoints" / "step-00000010")
    assert newest_whole(run, key="resume").step == 4


def test_one_of_an_earlier_version_is_taken_with_a_word(tmp_path: Path):
    old = make_checkpoint(tmp_path / "checkpoints" / "step-00000004", sealed=False)
    choice = newest_whole(tmp_path, key="resume")
    assert (choice.step, choice.passed) == (4, [])
    assert choice.lines == [
        "resume: step-00000004 has no manifest.json (an earlier version wrote it): its content is not checked"
    ]
    (old / "meta.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"step-00000004: meta.pt: empty"):
        newest_whole(tmp_path, key="resume")


def test_a_folder_that_was_named_is_verified_too(tmp_path: Path):
    folder = make_checkpoint(tmp_path / "step-00000004")
    assert check_given(folder, key="checkpoint") == []
    (folder / "meta.pt").unlink()
    seal(folder)
    assert check_given(folder, key="initial_weights", needs=(".metadata",)) == []
    with pytest.raises(ConfigError, match=r"^checkpoint=.*step-00000004: meta.pt: missing"):
        check_given(folder, key="checkpoint")
    with pytest.raises(Damaged, match="nowhere: No such file"):
        verify(tmp_path / "nowhere")
