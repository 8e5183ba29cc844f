"""`resume=<folder>`: goes on with a run in its own folder, from the overrides it was started with."""

import itertools
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sidestream.config.compatibility import auto_warmup
from sidestream.config.errors import ConfigError, as_typed
from sidestream.config.layout import Layout
from sidestream.config.resume_contract import RULES, Flat, Rule, rule_of
from sidestream.config.schema import SCHEMAS, options_with
from sidestream.convert.start import check_same_model
from sidestream.launch import arguments, taken
from sidestream.launch.record import RESOLVED, Launch, load_resolved
from sidestream.tracking import lock
from sidestream.tracking.integrity import FOLDER, LEFTOVER, Choice, checkpoints, newest_whole, step_of
from sidestream.tracking.untrusted import Unreadable, printable, read_json

STRICT = "resume.strict"  # of the command line only: `resume` is the folder itself

_NOT_SAID = ("resume", "debug", "trusted_targets")  # of this command, not of the run
_ABSENT = object()


strict = False  # set by `without_strict`
chosen: Choice | None = None  # set by `choose`, for the ranks


def rewrite(argv: list[str]) -> list[str]:
    """Expands `resume=<folder>`: the run's overrides, then the user's, in the run's folder.

    Args:
        argv: Arguments after the script's name; without `resume=` they come back as they are.

    Raises:
        ConfigError: the folder holds no run or no checkpoint, or jobs of a sweep are asked to resume.
    """
    flags, overrides = arguments.split(argv)
    wanted = [part for part in overrides if arguments.key_of(part) == "resume"]
    value = arguments.value_of(wanted[-1]) if wanted else "null"
    if value in ("null", ""):
        return argv
    if "-m" in flags or "--multirun" in flags:
        why = "a sweep starts new runs"
        raise ConfigError("resume", value, why, expected="a single run", fix="run without -m")
    folder = Path(value).expanduser().absolute()
    launch = _launch(folder, value)
    own = [part for part in overrides if arguments.key_of(part) != "resume"]
    set_again = {arguments.key_of(part): arguments.value_of(part) for part in own}
    kept = [part for part in launch.overrides if _stands(arguments.key_of(part), set_again)]
    saved = taken.take(kept, folder=folder, option="resume")
    taken.refuse_flags(launch.flags, arguments.config_flags(argv), folder=folder, option="resume")
    place = [
        f"resume={arguments.quoted(folder)}",
        f"hydra.run.dir={arguments.quoted(folder)}",
        "hydra.output_subdir=.hydra/resume",
    ]
    return [*flags, *saved, *own, *place]


def _stands(key: str, set_again: Mapping[str, str]) -> bool:
    """Whether a saved override is neither set anew nor of an option that gives way to one without such a key."""
    group = key.partition(".")[0]
    option, options = set_again.get(group), options_with(key)
    gives_way = option in SCHEMAS.get(group, {}) and option not in options and bool(options)
    return key not in set_again and not gives_way


def _launch(folder: Path, value: str) -> Launch:
    expected = "the folder of a run, with checkpoints"
    try:
        launch = Launch.load(folder)
    except FileNotFoundError as error:
        why = "no run was started in this folder" if folder.is_dir() else "there is no such folder"
        raise ConfigError("resume", value, why, expected=expected, fix="resume=<run folder>") from error
    except Unreadable as error:
        fix = "resume=<run folder>"
        raise ConfigError("resume", value, str(error), expected=expected, fix=fix) from error
    lock.refuse_held(folder, key="resume")
    if not any((folder / FOLDER).glob("step-*")):
        why = "the run has no checkpoint yet"
        raise ConfigError("resume", value, why, expected=expected, fix="run it again from the start")
    return launch


def without_strict(argv: list[str]) -> list[str]:
    """Takes `resume.strict=` out of a command line and keeps its value.

    Raises:
        ConfigError: it is neither true nor false, or nothing is resumed.
    """
    global strict
    given = [part for part in argv if arguments.key_of(part) == STRICT]
    value = arguments.value_of(given[-1]).lower() if given else "false"
    if value not in ("true", "false"):
        why = "neither true nor false"
        raise ConfigError(STRICT, value, why, expected="true or false", fix=f"{STRICT}=true")
    resumes = any(arguments.key_of(part) in ("resume", "resume_sweep") for part in argv)
    if given and not resumes:
        why = "nothing is resumed"
        raise ConfigError(
            STRICT, value, why, expected="resume=<run folder> beside it", fix=f"remove {STRICT}"
        )
    strict = value == "true"
    return [part for part in argv if part not in given]


def choose(folder: Path) -> Choice:
    """Takes a run folder for this process, and finds the checkpoint to go on from.

    Raises:
        ConfigError: Another process has the folder; no checkpoint is whole; one is damaged and `resume.strict=true`.
    """
    global chosen
    lock.hold(folder, key="resume")
    chosen = newest_whole(folder, key="resume", strict=strict)
    return chosen


def clear_up(folder: Path, passed: list[Path]) -> None:
    """Removes what killed saves left, and moves damaged checkpoints out of the way of those that will be written.

    Args:
        passed: See `Choice.passed`.
    """
    for path in (folder / FOLDER).glob(".step-*"):
        if LEFTOVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
    for path in passed:
        names = (path.with_name(f".{path.name}.damaged-{n}") for n in itertools.count())
        path.rename(next(name for name in names if not os.path.lexists(name)))


def is_finished(folder: Path) -> bool:
    """Whether a run has ended by itself: trained, validated, its result written."""
    try:
        return read_json(folder / "result.json", inside=folder).get("status") == "finished"
    except Unreadable:
        return False


def check_changes(folder: Path, *, new: dict[str, Any], layout: Layout, done: int | None = None) -> list[str]:
    """Compares a resolved config with the one the run had.

    Args:
        done: Steps in the checkpoint that is taken; None: in the newest one.

    Returns:
        One line per changed key, and per consequence the user should know.

    Raises:
        ConfigError: the contract refuses a change (`config/resume_contract.py`).
    """
    try:
        old = dict(_flat(load_resolved(folder), ""))
    except Unreadable as error:
        fix = "run anew without resume="
        raise ConfigError("resume", folder, str(error), expected="the config of the run", fix=fix) from None
    now = dict(_flat(new, ""))
    launch = Launch.load(folder)
    lines = [line for key in _changed(old, now) if (line := _change(key, old, now, launch.choices))]
    if _rate_follows_the_end(old, now):
        lines.append(
            "resume: the learning rate depends on trainer.max_steps, so this is no longer bit-identical to a run "
            f"started with trainer.max_steps={now['trainer.max_steps']}"
        )
    if done is None:
        done = max((step_of(path) for path in checkpoints(folder)), default=0)
    if done == now["trainer.max_steps"] and not is_finished(folder):
        lines.append(f"resume: all {done} steps are trained; what is missing behind the last one is done now")
    elif done >= now["trainer.max_steps"]:
        why = f"the run has {done} steps already"
        expected, fix = f"more than {done}", f"trainer.max_steps={2 * done}"
        raise ConfigError("trainer.max_steps", now["trainer.max_steps"], why, expected=expected, fix=fix)
    for checkpoint in (path for path in checkpoints(folder) if step_of(path) == done):
        check_same_model(new, checkpoint, key="resume", fix="run anew without resume=")
    for name in ("world_size", "expert_parallel_size", "device_type"):
        before, after = getattr(launch.layout, name), getattr(layout, name)
        if before != after:
            lines.append(f"resume: {name} {before} -> {after}")
    return lines


def _changed(old: Flat, now: Flat) -> list[str]:
    """Keys with another value; of a group whose option is another, that first, and no key that only one of them has."""
    keys = [key for key in dict.fromkeys([*old, *now]) if old.get(key, _ABSENT) != now.get(key, _ABSENT)]
    options = [key for key in keys if key.endswith("._target_")]
    groups = {key.partition(".")[0] for key in options}
    kept = [key for key in keys if key.partition(".")[0] not in groups or (key in old and key in now)]
    return list(dict.fromkeys([*options, *kept]))


def _change(key: str, old: Flat, now: Flat, choices: Mapping[str, str]) -> str | None:
    """Returns the line that reports a change; None where there is nothing to say.

    Args:
        choices: Group -> option of the run.

    Raises:
        ConfigError: the contract refuses it.
    """
    rule = rule_of(key, old, now)
    before, after = (printable(as_typed(flat[key])) if key in flat else "absent" for flat in (old, now))
    if key not in old and key in RULES:
        rule = Rule("changes", "", said="the run is from a version without this key")
    if rule.kind == "refused":
        why = f"was {before} when the run started, and does not change in a resume: {rule.why}"
        group = key.partition(".")[0]
        chosen = choices.get(group) if key.endswith("._target_") else None
        typed = f"{group}={printable(chosen)}" if chosen else f"{key}={before}"
        fix = typed if key in old else f"remove {key}"
        raise ConfigError(key, now.get(key), why, expected=before, fix=fix)
    if key in _NOT_SAID:
        return None
    return f"resume: {key} {before} -> {after}" + (f" ({rule.said})" if rule.said else "")


def keep_previous(folder: Path) -> None:
    """Keeps the resolved config of the earlier start as `resolved.<n>.yaml`."""
    resolved = folder / RESOLVED
    earlier = len(list(resolved.parent.glob("resolved.*.yaml")))
    shutil.copy(resolved, resolved.with_name(f"resolved.{earlier}.yaml"))


def _rate_follows_the_end(old: Flat, now: Flat) -> bool:
    """Whether the steps that are done would have had other rates with the new `trainer.max_steps`."""
    ends = [flat.get("trainer.max_steps") for flat in (old, now)]
    if str(now.get("scheduler._target_")).endswith(".Constant"):
        if now.get("scheduler.warmup_steps") != "auto":  # a share of the steps
            return False
        ends = [auto_warmup(steps or 0) for steps in ends]
    return ends[0] != ends[1]


def _flat(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _flat(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, node
