"""`latest`, wherever a run or a sweep is named: the one that was started last, below a log folder."""

import os
import sys
from datetime import datetime
from pathlib import Path

from sidestream import cli
from sidestream.config.errors import ConfigError
from sidestream.tracking.untrusted import printable

WORD = "latest"
LOGS = Path("logs")  # `paths.log_dir`, where nothing else is said
# Below <log folder>/<name>/: where they lie, and the file that every one of them has.
_KINDS = {"run": ("runs", ".hydra/launch.json"), "sweep": ("multiruns", "multirun.yaml")}
_MEASURED, _PREDICTED = "measure_overlap", "predict"
_STARTED = "%Y-%m-%d %H-%M-%S-%f"  # names of the two innermost folders


def run(value: str | os.PathLike[str], *, key: str = "folder", logs: Path = LOGS) -> Path:
    """Returns the folder of a run: `value` itself, or the newest run for `latest`, which is said on stderr.

    Args:
        value: What the user typed. `<folder>/latest` looks in another log folder than `logs`.
        key: The option that names a run.

    Raises:
        ConfigError: there is no run.
    """
    return _resolve(Path(value).expanduser(), "run", key, logs)


def sweep(value: str | os.PathLike[str], *, key: str = "folder", logs: Path = LOGS) -> Path:
    """Returns the folder of a sweep, see `run`."""
    return _resolve(Path(value).expanduser(), "sweep", key, logs)


def _resolve(value: Path, kind: str, key: str, logs: Path) -> Path:
    if value.name != WORD or os.path.lexists(value):
        return value
    root = value.parent if value.parent != Path() else logs.expanduser()
    place, mark = _KINDS[kind]
    # A measurement is no trained run, and the other way round.
    measures = cli.module() == _MEASURED
    found = [
        folder
        for folder in root.glob(f"*/{place}/*/*")
        if (folder / mark).is_file()
        and (folder.parts[-4] == _MEASURED) == measures
        and folder.parts[-4] != _PREDICTED
    ]
    if not found:
        why = f"no {kind} below {printable(root)}"
        raise ConfigError(key, value, why, expected=f"a {kind} that was started here", fix=f"{key}=<{kind}>")
    newest = max(found, key=lambda folder: (_started(folder, mark), folder))
    print(f"{key}={value}: {printable(os.path.relpath(newest))}", file=sys.stderr, flush=True)
    return newest


def _started(folder: Path, mark: str) -> float:
    """Seconds since the epoch at which a run began, by its name; by its first file where it has another one."""
    try:
        return datetime.strptime(f"{folder.parent.name} {folder.name}", _STARTED).timestamp()
    except ValueError:
        return (folder / mark).stat().st_mtime


__all__ = ["LOGS", "WORD", "run", "sweep"]
