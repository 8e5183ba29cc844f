"""Finds the runs in folders and reads what each left behind."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sidestream.compare.errors import CompareError
from sidestream.launch import arguments
from sidestream.tracking import expert_load
from sidestream.tracking.folder import RunFolder, is_figure
from sidestream.tracking.result import misfit
from sidestream.tracking.untrusted import Unreadable, printable, read_json, read_yaml

RESULT, LAUNCH, SWEEP = "result.json", ".hydra/launch.json", "multirun.yaml"
LONGEST = 60  # characters of a run's name
LONGEST_VALUE = 10_000  # characters of a text in a config: more are not told apart
PICTURES = ("overlap.svg", "overlap.png")  # the first that is there
TRAINING, MEASUREMENT = "training", "measurement"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One finished run.

    Attributes:
        name: Short and unique among the compared runs.
        kind: `training`, or `measurement` for a run of scripts/measure_overlap.py.
        config: Dotted key -> value, see `flatten`.
        choices: Hydra group -> option.
        result: result.json; keys may be missing.
        metrics: Records of metrics.jsonl, in order of steps.
        load: Records of expert_load.jsonl.
        env: env.json, `{}` where there is none.
        picture: Timeline of the overlap, None where none was drawn.
        skipped: A printable line per file of which something could not be read.
        sweep: What jobs of one sweep have in common; None for a run of its own.
        overrides: Key -> value as typed.
    """

    name: str
    kind: str = TRAINING
    config: Mapping[str, Any]
    choices: Mapping[str, str]
    result: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]] = ()
    load: Sequence[dict[str, Any]] = ()
    env: Mapping[str, Any] = field(default_factory=dict)
    picture: Path | None = None
    skipped: tuple[str, ...] = ()
    sweep: str | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)

    @property
    def seed(self) -> int | None:
        found = self.result.get("seed"), self.config.get("seed")
        return next((seed for seed in found if is_figure(seed) and isinstance(seed, int)), None)

    def part(self, name: str) -> Mapping[str, Any]:
        """A part of result.json such as `metrics`, `{}` where the run has none."""
        return self.result.get(name) or {}


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A folder that is not compared, and why."""

    name: str
    reason: str


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value, with lists as values and empty sections left out."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{below}": item for below, item in flatten(value).items()})
        else:
            flat[str(key)] = value
    return flat


def read_folders(folders: Sequence[Path]) -> tuple[list[Run], list[LeftOut]]:
    """Reads the runs in `folders`, at any depth, in the order of their names.

    Returns:
        The finished runs, and the folders that are left out.

    Raises:
        CompareError: a folder does not exist or holds no run.
    """
    places: list[Path] = []
    for folder in folders:
        found = run_folders(folder)
        if not found:
            why = "there is no run in it" if folder.is_dir() else "no such folder"
            raise CompareError(
                f"folder={printable(folder)}: {why}; expected the folder of a run or of a sweep; "
                f"pass a folder that has {RESULT} in it or below it"
            )
        places += [place for place in found if place.resolve() not in {known.resolve() for known in places}]
    runs: list[Run] = []
    left_out: list[LeftOut] = []
    for place, name in zip(places, short_names(places)):
        try:
            runs.append(replace(read_run(place), name=name))
        except CompareError as error:
            left_out.append(LeftOut(name=name, reason=str(error)))
    return runs, left_out


def run_folders(folder: Path) -> list[Path]:
    """Folders of runs in a folder, itself included, in natural order: job 2 before job 10."""
    found = {path.parent for path in folder.rglob(RESULT)}
    # A run that died before it wrote a result has its config.
    found |= {path.parent.parent for path in folder.rglob(".hydra/resolved.yaml")}
    found |= {path.parent.parent for path in folder.rglob(".hydra/config.yaml")}
    return sorted(found, key=lambda path: _natural(str(path)))


def _natural(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def short_names(places: Sequence[Path]) -> list[str]:
    """The folder's own name where it is unique, its beginning if it is long, else as much of the path as is needed."""
    for parts in (1, 2, 3):
        names = [printable("/".join(place.resolve().parts[-parts:])) for place in places]
        short = [name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..." for name in names]
        for chosen in (short, names):
            if len(set(chosen)) == len(chosen):
                return chosen
    return [printable(place.resolve(), limit=LONGEST_VALUE) for place in places]


def read_run(folder: Path) -> Run:
    """Reads a finished run. Anybody may have written its files.

    Raises:
        CompareError: the run did not finish, or its files cannot be read; one line.
    """
    try:
        result = _json(folder, RESULT)
        if result is None:
            raise CompareError(f"no {RESULT}: it still starts, or died before it wrote one")
        result = _shown(result)
        if wrong := misfit(result):
            raise CompareError(f"{RESULT}: {wrong}")
        if result.get("status") != "finished":
            error = f": {result['error']}" if result.get("error") else ""
            raise CompareError(f"status {result.get('status')}{error}")
        config = _config(folder)
        skipped: list[str] = []
        files = RunFolder(folder, tell=skipped.append)
        metrics, load = files.read_metrics(), files.read_expert_load()
        env = _env(folder, skipped)
    except Unreadable as error:
        raise CompareError(_in(folder, error)) from None
    return Run(
        name=folder.name,
        kind=MEASUREMENT if any(key.startswith("measure.") for key in config) else TRAINING,
        config=config,
        choices=result.get("choices") or {},
        result=result,
        metrics=[_figures(record) for record in metrics],
        load=expert_load.whole(load),
        env=env,
        picture=_picture(folder),
        skipped=tuple(_in(folder, line) for line in skipped),
        sweep=str(folder.resolve().parent) if (folder.resolve().parent / SWEEP).is_file() else None,
        overrides=_overrides(folder),
    )


def _in(folder: Path, told: object) -> str:
    """A line about a file with the file's name alone: the folder is named beside it."""
    return str(told).removeprefix(f"{printable(folder)}{os.sep}")


def _figures(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with what is no number left out."""
    return {name: value for name, value in record.items() if is_figure(value)}


def _picture(folder: Path) -> Path | None:
    """The timeline, if it lies in the folder itself: what is embedded in a page is published with it."""
    for name in PICTURES:
        path = folder / name
        if path.resolve().parent == folder.resolve() and path.is_file():
            return path
    return None


def _json(folder: Path, name: str) -> dict[str, Any] | None:
    return read_json(folder / name, inside=folder) if os.path.lexists(folder / name) else None


def _env(folder: Path, skipped: list[str]) -> dict[str, Any]:
    """env.json, `{}` where there is none that can be read: a run can be compared without."""
    try:
        found = _json(folder, "env.json") or {}
    except Unreadable as error:
        skipped.append(str(error))
        found = {}
    return {
        name: _shown(value) for name, value in found.items() if isinstance(value, str) or is_figure(value)
    }


def _overrides(folder: Path) -> dict[str, str]:
    """Of launch.json, `{}` where they cannot be read: then nothing of the run counts as swept."""
    try:
        found = (_json(folder, LAUNCH) or {}).get("overrides")
    except Unreadable:
        return {}
    return as_typed(found)


def as_typed(overrides: Any) -> dict[str, str]:
    """Key -> value of a list of overrides that somebody may have written."""
    if not isinstance(overrides, list):
        return {}
    parts = [printable(part, limit=LONGEST_VALUE) for part in overrides if isinstance(part, str)]
    return {arguments.key_of(part): arguments.value_of(part) for part in parts}


def _config(folder: Path) -> dict[str, Any]:
    path = folder / ".hydra" / "resolved.yaml"
    if not path.exists():
        raise CompareError("no .hydra/resolved.yaml: whether it is comparable cannot be told")
    return flatten(_shown(read_yaml(path, inside=folder)))


def _shown(value: Any) -> Any:
    """The same with every text, and every key, as it may be shown."""
    if isinstance(value, Mapping):
        return {printable(key): _shown(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    return printable(value, limit=LONGEST_VALUE) if isinstance(value, str) else value
