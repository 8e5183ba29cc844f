"""`resume=<folder>`: goes on with a run in its own folder, from the overrides it was started with."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sidestream.config.compatibility import Layout
from sidestream.config.errors import ConfigError, as_typed
from sidestream.launch import arguments, taken
from sidestream.launch.record import RESOLVED, Launch, load_resolved
from sidestream.tracking.untrusted import Unreadable

# What a checkpoint depends on. The seed draws the order of the data.
FIXED = ("model.", "router.", "balance.", "data.", "seed")
FREE = ("data.micro_batch_size", "data.cache_dir")  # memory and places only
IGNORED = ("resume", "debug", "trusted_targets")


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
    set_again = {arguments.key_of(part) for part in own}
    kept = [part for part in launch.overrides if arguments.key_of(part) not in set_again]
    saved = taken.take(kept, folder=folder, option="resume")
    taken.refuse_flags(launch.flags, arguments.config_flags(argv), folder=folder, option="resume")
    place = [
        f"resume={arguments.quoted(folder)}",
        f"hydra.run.dir={arguments.quoted(folder)}",
        "hydra.output_subdir=.hydra/resume",
    ]
    return [*flags, *saved, *own, *place]


def _launch(folder: Path, value: str) -> Launch:
    expected = "the folder of a run, with checkpoints"
    try:
        launch = Launch.load(folder)
    except FileNotFoundError as error:
        why = "no run was started in this folder" if folder.is_dir() else "there is no such folder"
        raise ConfigError("resume", value, why, expected=expected, fix="resume=<run folder>") from error
    except Unreadable as error:
        raise ConfigError(
            "resume", value, str(error), expected=expected, fix="resume=<run folder>"
        ) from error
    if not any((folder / "checkpoints").glob("step-*/")):
        why = "the run has no checkpoint yet"
        raise ConfigError("resume", value, why, expected=expected, fix="run it again from the start")
    return launch


def check_changes(folder: Path, *, new: dict[str, Any], layout: Layout) -> list[str]:
    """Compares a resolved config with the one the run had.

    Returns:
        One line per changed key, and per consequence the user should know.

    Raises:
        ConfigError: the change would make the checkpoint another model's or another data order's.
    """
    old = dict(_flat(load_resolved(folder), ""))
    now = dict(_flat(new, ""))
    lines = []
    for key in dict.fromkeys([*old, *now]):
        before, after = old.get(key), now.get(key)
        if before == after or key in IGNORED:
            continue
        if key.startswith(FIXED) and key not in FREE:
            why = f"was {as_typed(before)} when the run started; a resumed run keeps its model and data"
            raise ConfigError(key, after, why, expected=as_typed(before), fix=f"{key}={as_typed(before)}")
        lines.append(f"resume: {key} {as_typed(before)} -> {as_typed(after)}")
    if old["trainer.max_steps"] != now["trainer.max_steps"] and _decays(now):
        lines.append(
            "resume: the learning rate depends on trainer.max_steps, so this is no longer bit-identical to a run "
            f"started with trainer.max_steps={now['trainer.max_steps']}"
        )
    saved = (folder / "checkpoints").glob("step-*/")
    done = max((int(path.name.removeprefix("step-")) for path in saved), default=0)
    if done >= now["trainer.max_steps"]:
        why = f"the run has {done} steps already"
        expected, fix = f"more than {done}", f"trainer.max_steps={2 * done}"
        raise ConfigError("trainer.max_steps", now["trainer.max_steps"], why, expected=expected, fix=fix)
    started = Launch.load(folder).layout
    for name in ("world_size", "expert_parallel_size", "device_type"):
        if getattr(started, name) != getattr(layout, name):
            lines.append(f"resume: {name} {getattr(started, name)} -> {getattr(layout, name)}")
    return lines


def keep_previous(folder: Path) -> None:
    """Keeps the resolved config of the earlier start as `resolved.<n>.yaml`."""
    resolved = folder / RESOLVED
    earlier = len(list(resolved.parent.glob("resolved.*.yaml")))
    shutil.copy(resolved, resolved.with_name(f"resolved.{earlier}.yaml"))


def _decays(flat: dict[str, Any]) -> bool:
    return not str(flat.get("scheduler._target_")).endswith(".Constant")


def _flat(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield from _flat(value, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, node
