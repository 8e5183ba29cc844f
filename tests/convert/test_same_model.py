"""Weights of another function than the config's are refused by name: sizes alone would fit, and losses would lie."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from sidestream import build
from sidestream.config.errors import ConfigError
from sidestream.config.layout import Layout
from sidestream.convert.start import (
    MODEL,
    check_same_model,
    check_weights,
    described,
    other_tokens,
    tokenizer_of,
)
from sidestream.data.corpus import DataSource
from sidestream.data.text import TextFiles
from sidestream.data.token_files import TokenFiles
from sidestream.evaluate import check_schedule
from sidestream.launch import resume
from sidestream.launch.record import Launch
from sidestream.overlap.none import NoOverlap
from sidestream.overlap.shortcut import ShortcutOverlap
from tests.convert.tiny import write_run
from tests.data.sources import COMMON
from tests.docs.pages import script
from tests.fake_checkpoint import seal

LAYOUT = Layout(1, 1, 1, 1, 2, 1, "cpu")
OTHER = ("model.rope_theta=100", "router.top_k=1", "balance=bias")
NAMED = r"model\.rope_theta is 100\.0 there and 10000\.0 here, .*router\.top_k is 1 there and 2 here"


def finish(run: Path, cfg: dict[str, Any], *, tokenizer: str = "bytes") -> Path:
    """What a training leaves beside weights; returns the checkpoint."""
    Launch("python train.py", [], [], {"model": "tiny"}, LAYOUT).save(run)
    return say(run / "checkpoints" / "step-00000001", cfg, tokenizer=tokenizer)


def say(checkpoint: Path, cfg: dict[str, Any], *, tokenizer: str = "bytes") -> Path:
    (checkpoint / MODEL).write_text(json.dumps(described(cfg, vocab_size=256, tokenizer=tokenizer)))
    seal(checkpoint)
    return checkpoint


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Path, dict[str, Any]]:
    """Two runs of equal shapes whose weights compute something else, and their configs."""
    here = tmp_path_factory.mktemp("runs")
    pair = []
    for name, more in (("a", ()), ("b", OTHER)):
        cfg = write_run(here / name, "model.num_layers=2", *more)
        finish(here / name, cfg)
        pair += [here / name, cfg]
    return tuple(pair)  # type: ignore[return-value]


def checkpoint_of(run: Path) -> Path:
    return run / "checkpoints" / "step-00000001"


def test_eval_refuses_a_checkpoint_of_another_function(
    runs: tuple[Path, Any, Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, _, theirs, _ = runs
    evaluation = script("eval.py")
    monkeypatch.setattr(evaluation, "report", lambda *args, **kwargs: None)
    evaluation.main([f"run={ours}"])
    evaluation.main([f"run={theirs}", f"checkpoint={checkpoint_of(theirs)}"])
    with pytest.raises(ConfigError, match=rf"^checkpoint=.*step-00000001 is of another model: {NAMED}") as no:
        evaluation.main([f"run={ours}", f"checkpoint={checkpoint_of(theirs)}"])
    assert "\n" not in str(no.value) and "set run=<the run" in str(no.value)


def test_a_checkpoint_copied_into_another_run_is_not_resumed(
    runs: tuple[Path, Any, Path, Any], tmp_path: Path
) -> None:
    ours, cfg, theirs, _ = runs
    shutil.copytree(ours, tmp_path / "run")
    new = {**cfg, "trainer": {**cfg["trainer"], "max_steps": 9}}
    resume.check_changes(tmp_path / "run", new=new, layout=LAYOUT, done=1)
    shutil.rmtree(checkpoint_of(tmp_path / "run"))
    shutil.copytree(checkpoint_of(theirs), checkpoint_of(tmp_path / "run"))
    with pytest.raises(ConfigError, match=f"^resume=.*: step-00000001 is of another model: {NAMED}"):
        resume.check_changes(tmp_path / "run", new=new, layout=LAYOUT, done=1)


def test_an_export_refuses_it(runs: tuple[Path, Any, Path, Any], tmp_path: Path) -> None:
    shutil.copytree(runs[0], tmp_path / "run")
    shutil.rmtree(checkpoint_of(tmp_path / "run"))
    shutil.copytree(checkpoint_of(runs[2]), checkpoint_of(tmp_path / "run"))
    with pytest.raises(ConfigError, match=f"^run=.*: step-00000001 is of another model: {NAMED}"):
        script("scripts/convert_hf.py").export(tmp_path / "run", tmp_path / "out", dtype=None)


def test_initial_weights_are_what_their_checkpoint_says(
    runs: tuple[Path, Any, Path, Any], tmp_path: Path
) -> None:
    """Wherever it lies: alone, or in the folder of a run that never wrote it."""
    ours, cfg, theirs, other = runs
    alone, inside = tmp_path / "checkpoint", tmp_path / "run" / "checkpoints" / "step-00000001"
    shutil.copytree(ours, tmp_path / "run")
    shutil.rmtree(inside)
    for place in (alone, inside):
        shutil.copytree(checkpoint_of(theirs), place)
        assert check_weights(other, place) is None
        with pytest.raises(ConfigError, match=r"^model\.rope_theta=10000\.0: .*100\.0; also router\.top_k=2"):
            check_weights(cfg, place)


def test_a_checkpoint_of_an_earlier_version_is_taken_as_before(
    runs: tuple[Path, Any, Path, Any], tmp_path: Path
) -> None:
    shutil.copytree(checkpoint_of(runs[2]), tmp_path / "step-00000001")
    (tmp_path / "step-00000001" / MODEL).unlink()
    check_same_model(runs[1], tmp_path / "step-00000001", key="run", fix="")


def test_classes_of_ones_own_are_compared_by_name_and_key(
    tmp_path: Path, runs: tuple[Path, Any, Path, Any]
) -> None:
    cfg = {**runs[1], "router": {"_target_": "mine.Router", "sharp": float("nan"), "by": {1: 2}}}
    checkpoint = tmp_path / "step-00000001"
    checkpoint.mkdir()
    say(checkpoint, cfg)
    check_same_model(cfg, checkpoint, key="run", fix="")
    for group, section in (
        ("router", {**cfg["router"], "sharp": 2}),
        ("balance", {"_target_": "mine.Balance"}),
    ):
        with pytest.raises(ConfigError, match=rf"{group}\.(sharp|_target_) is "):
            check_same_model({**cfg, group: section}, checkpoint, key="run", fix="")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"model": 3}',
        '{"model": {}, "router": []}',
        '{"balance": 3}',
        "\0",
        '{"model": {"num_layers": 4000000000}}',
    ],
)
def test_what_a_checkpoint_says_may_be_from_anybody(
    text: str, runs: tuple[Path, Any, Path, Any], tmp_path: Path
) -> None:
    (tmp_path / MODEL).write_text(text)
    with pytest.raises(ConfigError, match=r"^run=.*model\.json") as refused:
        check_same_model(runs[1], tmp_path, key="run", fix="")
    assert "\n" not in str(refused.value)


def test_what_it_says_is_shown_and_not_obeyed(runs: tuple[Path, Any, Path, Any], tmp_path: Path) -> None:
    evil = "\x1b[2J\nok"
    cfg = {**runs[3], "router": {**runs[3]["router"], "score_order": evil, "num_groups": 2}}
    (tmp_path / MODEL).write_text(json.dumps(described(cfg)))
    with pytest.raises(ConfigError) as refused:
        check_same_model(runs[1], tmp_path, key="run", fix="")
    assert "\x1b" not in str(refused.value) and "\n" not in str(refused.value)


def test_a_schedule_of_another_function_is_not_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sidestream.evaluate as evaluation

    def saved(**facts: str) -> None:
        monkeypatch.setattr(evaluation, "load_meta", lambda folder: {"sidestream": facts})

    saved(function="plain")
    check_schedule(NoOverlap(), tmp_path)
    with pytest.raises(ConfigError, match="computes plain, and the run has one that computes shortcut"):
        check_schedule(ShortcutOverlap(), tmp_path)
    saved()  # of an earlier version
    check_schedule(ShortcutOverlap(), tmp_path)


# ---- tokens


def test_weights_of_another_tokenizer_are_said(
    runs: tuple[Path, Any, Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours, cfg, _, _ = runs
    bpe, other = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"
    copied = tmp_path / "step-00000001"
    shutil.copytree(checkpoint_of(ours), copied)
    for there, here in (("bytes", bpe), (bpe, "bytes"), (bpe, other)):
        say(copied, cfg, tokenizer=there)
        assert f"({there[:19]}" in str(other_tokens(copied, here)) and "\n" not in str(
            other_tokens(copied, here)
        )
    assert other_tokens(copied, bpe) is None and other_tokens(copied, None) is None
    started: Any = OmegaConf.create({**cfg, "initial_weights": str(copied)})
    with caplog.at_level(logging.WARNING):
        build.model_builder(started, vocab_size=256, tokenizer="bytes", device=None)  # type: ignore[arg-type]
    assert "initial_weights: the weights in" in caplog.text and "another tokenizer" in caplog.text


def test_tokens_of_a_hugging_face_folder_are_those_of_its_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert other_tokens(tmp_path, "bytes") is None
    (tmp_path / "tokenizer.json").write_text("{}")
    own = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    assert other_tokens(tmp_path, own) is None and other_tokens(tmp_path, "bytes")


def test_every_source_says_whose_tokens_it_has(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words\n" * 20)
    np.save(tmp_path / "t.npy", np.arange(200, dtype=np.uint8))
    (tmp_path / "tokenizer.json").write_text("{}")
    shared = {**COMMON, "cache_dir": str(tmp_path / "cache")}
    text = {"files": [str(tmp_path / "a.txt")], "val_files": [], "val_fraction": 0.2}
    tokens = {"train_file": str(tmp_path / "t.npy"), "val_file": None, "val_fraction": 0.1, "dtype": None}
    sources: list[DataSource] = [TextFiles(**shared, **text)]
    for tokenizer in (None, "bytes", str(tmp_path / "tokenizer.json")):
        sources.append(TokenFiles(**shared, **tokens, vocab_size=200, eos_token=None, tokenizer=tokenizer))
    said = [source.load().tokenizer for source in sources]
    assert said == ["bytes", None, "bytes", tokenizer_of(tmp_path)]
