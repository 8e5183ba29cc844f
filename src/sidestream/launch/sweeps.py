"""`resume_sweep=<folder>`: runs a sweep again in its own folder, without the jobs that have finished."""

import contextlib
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from sidestream import cli
from sidestream.config.errors import ConfigError
from sidestream.config.layout import Layout
from sidestream.config.place import CONF
from sidestream.launch import arguments, resume, taken
from sidestream.launch.record import Launch
from sidestream.tracking.integrity import FOLDER, newest_whole
from sidestream.tracking.sweep import Job, read_table
from sidestream.tracking.untrusted import Unreadable, read_json, read_yaml

KEY = "resume_sweep"
SAVED = "multirun.yaml"  # Hydra's, written anew at every start of the sweep
ASIDE = ".failed-"  # what a job left that starts from scratch: `<folder>.failed-<n>`


@dataclass(frozen=True)
class Again:
    """The sweep that this process runs again.

    Attributes:
        changed: Keys that the user set anew.
    """

    folder: Path
    changed: frozenset[str]


@dataclass(frozen=True)
class _Saved:
    """What multirun.yaml says about the command line of a sweep, Hydra's own overrides included."""

    overrides: list[str]
    flags: list[str]


again: Again | None = None  # set by `rewrite`, for the launcher
_held: dict[Path, int] = {}  # sweep folder -> descriptor of its lock, open until this process ends


def rewrite(argv: list[str]) -> list[str]:
    """Expands `resume_sweep=<folder>`: the sweep's overrides, then the user's, in the sweep's folder, and `-m`.

    Args:
        argv: Arguments after the script's name; without `resume_sweep=` they come back as they are.

    Raises:
        ConfigError: the folder holds no sweep, another process runs it, or a run is resumed at the same time.
    """
    global again
    flags, overrides = arguments.split(argv)
    wanted = [part for part in overrides if arguments.key_of(part) == KEY]
    value = arguments.value_of(wanted[-1]) if wanted else "null"
    own = [part for part in overrides if arguments.key_of(part) != KEY]
    if value in ("null", ""):
        return [part for part in argv if part not in wanted]
    if any(arguments.key_of(part) == "resume" and arguments.value_of(part) != "null" for part in own):
        why = "resume= goes on with one run"
        raise ConfigError(KEY, value, why, expected="one of the two", fix="run without resume=")
    folder = Path(value).expanduser().absolute()
    saved = _saved(folder, value)
    if not hold(folder):
        why = "another process runs this sweep"
        raise ConfigError(KEY, value, why, expected="a sweep that has ended", fix="wait for its end")
    own = [part for part in own if arguments.key_of(part) not in ("hydra.sweep.dir", "hydra.mode")]
    changed = {arguments.key_of(part) for part in own}
    ours = ("hydra.sweep.dir", "hydra.mode", KEY)
    again_set = {*changed, *ours}
    kept = [part for part in saved.overrides if arguments.key_of(part) not in again_set]
    kept = taken.take(kept, folder=folder, option=KEY)
    taken.refuse_flags(saved.flags, arguments.config_flags(argv), folder=folder, option=KEY)
    again = Again(folder, frozenset(changed))
    multirun = [] if {"-m", "--multirun"} & set(flags) else ["-m"]
    return [*flags, *multirun, *kept, *own, f"hydra.sweep.dir={arguments.quoted(folder)}"]


def _saved(folder: Path, value: str) -> _Saved:
    cause: Exception
    try:
        if not (folder / SAVED).exists():
            raise FileNotFoundError(folder / SAVED)
        # An override may hold ${...}, which is for the jobs to fill in: nothing is evaluated here.
        hydra = read_yaml(folder / SAVED, inside=folder)["hydra"]
        overrides = [*hydra["overrides"]["task"], *hydra["overrides"]["hydra"]]
        sources = {source["provider"]: source["path"] for source in hydra["runtime"]["config_sources"]}
        name = hydra["job"]["config_name"]
        if not all(isinstance(text, str) for text in (*overrides, *sources, *sources.values(), name)):
            raise TypeError("other values than text")
        return _Saved(overrides, _config_flags(name, sources))
    except FileNotFoundError as error:
        why = "no sweep was started in this folder" if folder.is_dir() else "there is no such folder"
        cause = error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why, cause = f"its {SAVED} cannot be read ({type(error).__name__}: {error})", error
    expected = f"the folder of a sweep, with its {SAVED}"
    raise ConfigError(KEY, value, why, expected=expected, fix=f"{KEY}=<sweep folder>") from cause


def _config_flags(name: str, sources: dict[str, str]) -> list[str]:
    """Returns the flags that chose where configs were read from.

    Args:
        sources: Hydra's name of a place -> folder.
    """
    flags = [] if name == cli.module() else ["--config-name", name]
    if "command-line" in sources:
        flags += ["--config-dir", sources["command-line"]]
    main = Path(sources.get("main", ""))
    # Naming the shipped one would tie the sweep to where this checkout, or this environment, lies.
    if main.is_absolute() and main.is_dir() and main.resolve() != CONF:
        flags += ["--config-path", str(main)]
    return flags


def hold(folder: Path) -> bool:
    """Takes the sweep's folder for this process until it ends; returns whether no other process has it.

    Does nothing where the system or the file system has no locks.
    """
    if folder in _held:
        return True
    try:
        import fcntl
    except ImportError:
        return True
    try:
        descriptor = os.open(folder / SAVED, os.O_RDWR)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    except OSError:
        os.close(descriptor)
        return True
    _held[folder] = descriptor
    return True


def find_earlier(jobs: Sequence[Job]) -> None:
    """Gives each job of a sweep that runs again the folder it had, and those that have finished their result.

    A job is found by its overrides. One whose sweep got other overrides keeps its folder if the rest of its overrides
    tell it from all other jobs; otherwise it is a new one.
    """
    assert again is not None
    seconds = {row.get("folder"): row.get("seconds") for row in read_table(again.folder)}
    there = _earlier(again.folder)
    new: list[Job] = []
    for job in jobs:
        same = [folder for folder, overrides in there.items() if overrides == values(job.overrides)]
        if not same:
            new.append(job)
            continue
        job.folder = job.folder if job.folder in same else same[0]
        result = _result(job.folder)
        if result.get("status") == "finished":
            job.result, job.code = result, 0
            with contextlib.suppress(ValueError):
                job.seconds = float(seconds.get(str(job.folder.relative_to(again.folder))) or 0.0)
    taken = {job.folder for job in jobs if job not in new}
    for job in new:
        rest = _without(values(job.overrides), again.changed)
        twins = [other for other in jobs if _without(values(other.overrides), again.changed) == rest]
        like = [folder for folder, found in there.items() if _without(found, again.changed) == rest]
        if len(twins) == 1 and len(like) == 1:
            job.folder = like[0]
        else:
            # Names are cut, so that of another job may be the same.
            others = (job.folder.with_name(f"{job.folder.name}-{n}") for n in itertools.count(2))
            free = itertools.chain([job.folder], others)
            job.folder = next(folder for folder in free if folder not in taken and folder not in there)
        taken.add(job.folder)


def values(overrides: list[str]) -> dict[str, str]:
    """Returns key -> value of overrides, the same for all ways to type them."""
    plain = arguments.without_null(overrides)
    return {arguments.key_of(part): arguments.value_of(part) for part in plain}


def _earlier(folder: Path) -> dict[Path, dict[str, str]]:
    """Returns folder -> overrides of the jobs that were started in a sweep's folder."""
    found = {}
    for path in sorted(folder.iterdir()):
        if ASIDE not in path.name and path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError, ValueError, TypeError):  # it ended before it wrote them
                found[path] = values(Launch.load(path).overrides)
    return found


def _without(overrides: dict[str, str], keys: frozenset[str]) -> dict[str, str]:
    return {key: value for key, value in overrides.items() if key not in keys}


def _result(folder: Path) -> dict[str, Any]:
    with contextlib.suppress(Unreadable):
        return read_json(folder / "result.json", inside=folder)
    return {}


def goes_on(folder: Path, *, new: dict[str, Any], layout: Layout) -> bool:
    """Returns whether a job can go on from a checkpoint in its folder with this resolved config."""
    if not any((folder / FOLDER).glob("step-*")):
        return False
    try:
        done = newest_whole(folder, key="resume", strict=resume.strict).step
    except ConfigError:
        return resume.strict  # then the job refuses, and says what is damaged
    try:
        resume.check_changes(folder, new=new, layout=layout, done=done)
    except (OSError, ValueError, KeyError, TypeError, OmegaConfBaseException):
        return False  # another model, no steps left, or files that a crash left unfinished
    return True


def set_aside(folder: Path) -> None:
    """Renames the folder of a job that starts from scratch, unless it holds nothing."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    numbers = itertools.count()
    aside = next(p for n in numbers if not (p := folder.with_name(f"{folder.name}{ASIDE}{n}")).exists())
    folder.rename(aside)


__all__ = ["Again", "find_earlier", "goes_on", "hold", "rewrite", "set_aside", "values"]
