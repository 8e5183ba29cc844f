"""What was due at a checkpoint happens on resume; what is not finite replaces nothing; hostile folders run nothing."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from sidestream.config.errors import ConfigError, PlainError
from sidestream.launch.record import Launch
from sidestream.parallel.checkpoint_reader import CheckpointReader, load_meta, load_state
from sidestream.tracking import integrity
from sidestream.tracking.folder import RunFolder
from sidestream.tracking.integrity import Damaged, checkpoints
from tests.fake_checkpoint import seal
from tests.rank_pool import ranks
from tests.train.fit import compose_run, fit, losses, tensors, train_one

SAVING = ["callbacks.checkpoint.every_n_steps=3", "trainer.val_check_interval=3"]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 steps on 2 ranks; validated and saved at 3 and 6."""
    folder = tmp_path_factory.mktemp("straight")
    fit(folder, *SAVING)
    return folder


def killed(run: Path, folder: Path, *, kept: Callable[[dict[str, Any]], bool], last: int) -> Path:
    """A copy as a kill leaves it: some records, checkpoints up to `last`, a result that says `running`."""
    shutil.copytree(run, folder)
    records = [record for record in RunFolder(run).read_metrics() if kept(record)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for checkpoint in checkpoints(folder):
        if integrity.step_of(checkpoint) > last:
            shutil.rmtree(checkpoint)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "status": "running"}))
    return folder


def error_of(folder: Path, *overrides: str, path: str | None = None) -> str:
    """How 2 ranks end that all raise. The pool lives on: they agree on what comes next."""
    cfg, layout = compose_run(list(overrides), world=2)
    (folder / ".hydra").mkdir(parents=True, exist_ok=True)
    Launch(command="", overrides=[], flags=[], choices={}, layout=layout).save(folder)
    first, second = ranks(2).run(
        raise_in_training, cfg=cfg, layout=asdict(layout), folder=str(folder), path=path, limit_s=240
    )
    assert first == second
    return first


def raise_in_training(rank: int, world: int, **arguments: Any) -> str:
    """One rank; returns its error."""
    try:
        train_one(rank, world, **arguments)
    except (ConfigError, PlainError) as error:
        return str(error)
    raise AssertionError("it trained")


def validations(run: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["val/loss"]) for r in RunFolder(run).read_metrics() if "val/loss" in r]


@pytest.mark.full
def test_a_validation_that_a_kill_prevented_is_made_up_for(straight: Path, tmp_path: Path) -> None:
    run = killed(straight, tmp_path / "run", kept=lambda r: r["step"] <= 3 and "val/loss" not in r, last=3)
    fit(run, *SAVING, f"resume={run}")
    assert [step for step, _ in validations(straight)] == [3, 6]
    assert validations(run) == validations(straight)
    assert losses(run) == losses(straight)


@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.sample(1)
def test_a_run_with_all_its_steps_is_finished_and_not_trained(
    straight: Path, tmp_path: Path, validated: bool
) -> None:
    last = validations(straight)[-1]
    run = killed(
        straight,
        tmp_path / "run",
        kept=lambda r: validated or "val/loss" not in r or r["step"] != last[0],
        last=6,
    )
    before = os.stat(checkpoints(run)[-1] / "meta.pt").st_ino
    results = fit(run, *SAVING, f"resume={run}")
    assert validations(run) == validations(straight)
    assert losses(run) == losses(straight)
    assert os.stat(checkpoints(run)[-1] / "meta.pt").st_ino == before
    whole = json.loads((straight / "result.json").read_text())
    for result in (*results, json.loads((run / "result.json").read_text())):
        assert result["status"] == "finished"
        for name in ("val_loss", "train_loss", "tokens"):
            assert result["metrics"][name] == whole["metrics"][name], name


OPTIMIZER = """
import pathlib
import torch


class Breaks(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        result = super().step(closure)
        self.steps += 1
        if self.steps == 4 and not pathlib.Path(__file__).with_name("healthy").exists():
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["spoiled"] = torch.full_like(parameter, torch.nan)
        return result
"""


@pytest.mark.full
def test_a_state_that_is_not_finite_replaces_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "breaks_pkg.py").write_text(OPTIMIZER)
    run = tmp_path / "run"
    common = ["callbacks.checkpoint.every_n_steps=2", "callbacks.checkpoint.keep_last=1"]
    own = ["optimizer=sgd", "optimizer._target_=breaks_pkg.Breaks", "trusted_targets=[breaks_pkg]"]
    error = error_of(run, *common, *own, path=str(tmp_path))
    assert re.match(r"step 4: not finite: spoiled of \S+ and \d+ more; no checkpoint was", error)
    assert "that of step 2 is kept; go on with: python train.py resume=" in error
    assert [path.name for path in checkpoints(run)] == ["step-00000002"]
    (tmp_path / "healthy").touch()
    results = fit(run, *common, *own, f"resume={run}", path=str(tmp_path))
    assert results[0]["status"] == "finished"
    assert list(losses(run)) == [1, 2, 3, 4, 5, 6]


class Evil:
    """Pickled, it makes a file where it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return (open, (self.marker, "w"))


def hostile_metadata(checkpoint: Path, marker: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Evil(marker)))


def hostile_within_metadata(checkpoint: Path, marker: Path) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    metadata.planner_data["x"] = Evil(marker)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def hostile_rank_metadata(checkpoint: Path, marker: Path) -> None:
    """DCP falls back to it where the common one cannot be read."""
    (checkpoint / "__0.metadata").write_bytes(pickle.dumps(Evil(marker)))
    (checkpoint / ".metadata").write_bytes(b"half")


def hostile_meta(checkpoint: Path, marker: Path) -> None:
    torch.save({"sidestream": Evil(marker)}, checkpoint / "meta.pt")


def append(checkpoint: Path, name: str, value: object) -> None:
    """Lets an entry point at `value`, pickled behind the other data."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    (index,) = (index for index in metadata.storage_data if index.fqn == name)
    place = metadata.storage_data[index]
    file = checkpoint / place.relative_path
    place.offset = file.stat().st_size
    with file.open("ab") as stream:
        torch.save(value, stream)
    place.length = file.stat().st_size - place.offset
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def hostile_value(checkpoint: Path, marker: Path) -> None:
    append(checkpoint, "optimizer_0.param_groups.0.weight_decay", Evil(marker))


def hostile_tensor(checkpoint: Path, marker: Path) -> None:
    append(checkpoint, "state_dict.model.embedding.weight", [torch.zeros(9999), Evil(marker)])


HOSTILE = [
    hostile_metadata,
    hostile_within_metadata,
    hostile_rank_metadata,
    hostile_meta,
    hostile_value,
    hostile_tensor,
]


def read_all(checkpoint: Path) -> None:
    """Everything that a resume reads, on one rank."""
    reader = CheckpointReader(checkpoint)
    wanted: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else None
        for name, entry in reader.read_metadata().state_dict_metadata.items()
    }
    load_state(wanted, reader, alone=True)
    load_meta(checkpoint)


@pytest.mark.parametrize("plant", HOSTILE)
def test_a_pickle_that_runs_something_is_refused(
    straight: Path, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    checkpoint = tmp_path / "step-00000003"
    shutil.copytree(checkpoints(straight)[0], checkpoint)
    read_all(checkpoint)
    plant(checkpoint, tmp_path / "marker")
    seal(checkpoint)  # whoever writes the folder writes its manifest too
    with pytest.raises(Damaged):
        read_all(checkpoint)
    assert not (tmp_path / "marker").exists()


def change(**fields: Any) -> Callable[[Any], None]:
    def apply(metadata: Any) -> None:
        index = MetadataIndex("state_dict.model.embedding.weight", (0, 0))
        for name, value in fields.items():
            setattr(metadata.storage_data[index], name, value)

    return apply


def enlarge(metadata: Any) -> None:
    entry = metadata.state_dict_metadata["state_dict.model.embedding.weight"]
    entry.size = entry.chunks[0].sizes = torch.Size([2**40, 64])


def leave_a_hole(metadata: Any) -> None:
    del metadata.state_dict_metadata["state_dict.model.blocks.1.moe.experts.w_down"].chunks[-1]


LIES = {
    "absolute": (change(relative_path="/etc/passwd"), "/etc/passwd is no file of a checkpoint"),
    "outside": (change(relative_path="../__0_0.distcp"), "is no file of a checkpoint"),
    "missing": (change(relative_path="__7_0.distcp"), "__7_0.distcp is missing"),
    "behind the end": (change(length=2**40), "more are said to be there"),
    "before the start": (change(offset=-1), "more are said to be there"),
    "transformed": (change(transform_descriptors=["zstd"]), "transformed"),
    "huge": (enlarge, "larger than what is stored of it"),
    "a hole": (leave_a_hole, "not the sum of its parts"),
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_cannot_be_true_is_refused(straight: Path, tmp_path: Path, lie: str) -> None:
    checkpoint = tmp_path / "step-00000003"
    shutil.copytree(checkpoints(straight)[0], checkpoint)
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    tell, why = LIES[lie]
    tell(metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(checkpoint)
    for read in (integrity.verify, CheckpointReader):
        with pytest.raises(Damaged, match=why):
            read(checkpoint)


def test_a_file_that_became_a_link_is_not_read(straight: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-00000003"
    shutil.copytree(checkpoints(straight)[0], checkpoint)
    reader = CheckpointReader(checkpoint)
    name = "state_dict.model.embedding.weight"
    wanted = {name: torch.empty(reader.read_metadata().state_dict_metadata[name].size)}  # type: ignore[union-attr]
    file = checkpoint / "__0_0.distcp"
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Damaged, match=r"__0_0\.distcp"):
        load_state(wanted, reader, alone=True)
    with pytest.raises(Damaged, match=r"__0_0\.distcp"):
        CheckpointReader(checkpoint)


def test_a_resume_of_a_hostile_checkpoint_runs_nothing_and_says_so(straight: Path, tmp_path: Path) -> None:
    run = killed(straight, tmp_path / "run", kept=lambda record: record["step"] <= 3, last=3)
    (checkpoint,) = checkpoints(run)
    hostile_metadata(checkpoint, tmp_path / "marker")
    seal(checkpoint)
    # The checkpoint itself, as the process that starts the ranks names it: changed since it was checked.
    changed = error_of(run, *SAVING, f"resume={checkpoint}")
    assert re.match(r"resume=.*step-00000003: .*\.metadata: it names io\.open", changed)
    assert "no whole checkpoint (step-00000003: " in error_of(run, *SAVING, f"resume={run}")
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("hostile", [hostile_metadata, hostile_tensor])
def test_initial_weights_of_a_hostile_checkpoint_run_nothing(
    straight: Path, tmp_path: Path, hostile: Callable[[Path, Path], None]
) -> None:
    checkpoint = tmp_path / "step-00000003"
    shutil.copytree(checkpoints(straight)[0], checkpoint)
    hostile(checkpoint, tmp_path / "marker")
    seal(checkpoint)
    error = error_of(tmp_path / "run", f"initial_weights={checkpoint}")
    assert re.match(r"initial_weights=.*: step-00000003: ", error)
    assert not (tmp_path / "marker").exists()


def test_what_is_written_is_whole_and_a_second_save_takes_the_place_of_a_damaged_one(
    straight: Path, tmp_path: Path
) -> None:
    assert all(integrity.verify(checkpoint) for checkpoint in checkpoints(straight))
    run = killed(straight, tmp_path / "run", kept=lambda record: True, last=6)
    with (checkpoints(run)[-1] / "__0_0.distcp").open("r+b") as file:
        file.truncate(1000)
    fit(run, *SAVING, f"resume={run}")
    assert integrity.verify(checkpoints(run)[-1])
    assert [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")] == []
    assert losses(run) == losses(straight)
    first, second = tensors(checkpoints(run)[-1]), tensors(checkpoints(straight)[-1])
    assert all(torch.equal(first[name], second[name]) for name in second)
