"""Finds the runs in folders and reads what each left behind."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from sidestream.compare.errors import CompareError
from sidestream.tracking.folder import RunFolder

RESULT = "result.json"
LONGEST = 60  # characters of a run's name
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

    @property
    def seed(self) -> int | None:
        seed = self.result.get("seed")
        return self.config.get("seed") if seed is None else seed

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
                f"folder={folder}: {why}; expected the folder of a run or of a sweep; "
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
        names = ["/".join(place.resolve().parts[-parts:]) for place in places]
        short = [name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..." for name in names]
        for chosen in (short, names):
            if len(set(chosen)) == len(chosen):
                return chosen
    return [str(place.resolve()) for place in places]


def read_run(folder: Path) -> Run:
    """Reads a finished run.

    Raises:
        CompareError: the run did not finish, or its files cannot be read; one line.
    """
    result = _json(folder / RESULT)
    if result is None:
        raise CompareError(f"no {RESULT}: it still starts, or died before it wrote one")
    if result.get("status") != "finished":
        error = f": {result['error']}" if result.get("error") else ""
        raise CompareError(f"status {result.get('status')}{error}")
    config = _config(folder)
    out = config.get("measure.out")
    drawn = [place / name for place in (folder, Path(out or folder)) for name in PICTURES]
    files = RunFolder(folder)
    try:
        metrics, load = files.read_metrics(), files.read_expert_load()
    except ValueError as error:
        raise CompareError(f"metrics.jsonl or expert_load.jsonl is damaged ({error})") from None
    return Run(
        name=folder.name,
        kind=MEASUREMENT if any(key.startswith("measure.") for key in config) else TRAINING,
        config=config,
        choices=result.get("choices") or {},
        result=result,
        metrics=metrics,
        load=[record for record in load if record.get("counts")],
        env=_json(folder / "env.json") or {},
        picture=next((path for path in drawn if path.exists()), None),
    )


def _json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CompareError(f"{path.name} is no JSON ({error})") from None
    if not isinstance(content, dict):
        raise CompareError(f"{path.name} holds no object")
    return content


def _config(folder: Path) -> dict[str, Any]:
    path = folder / ".hydra" / "resolved.yaml"
    if not path.exists():
        raise CompareError("no .hydra/resolved.yaml: whether it is comparable cannot be told")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise CompareError(f".hydra/resolved.yaml cannot be read ({str(error).splitlines()[0]})") from None
    return flatten(config or {})
