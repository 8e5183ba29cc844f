"""Command lines: taking them apart and writing values that Hydra reads back unchanged."""

import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser  # the only place that knows Hydra's flags
from omegaconf import OmegaConf

from sidestream import cli
from sidestream.config.errors import ConfigError
from sidestream.config.keys import takes_a_list
from sidestream.tracking import latest
from sidestream.tracking.integrity import checkpoints

LONGEST_NAME = 120  # characters of what tells jobs apart, in the name of a folder
# Where things lie, whom to trust, and what is in the folder above already.
_NEVER_IN_NAMES = (
    "name",
    "trusted_targets",
    "paths",
    "resume",
    "resume_sweep",
    "debug",
    "logger",
    "hydra",
    "data.cache_dir",
)
_SEVERAL = re.compile(r"(?:Ambiguous value for argument|Sweep parameters) '(.*?)'", re.DOTALL)


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Returns (flags with their values, overrides) of the arguments after the script's name, in whatever order."""
    overrides = get_args_parser().parse_intermixed_args(argv).overrides
    return [part for part in argv if part not in overrides], overrides


def runs(argv: list[str]) -> bool:
    """Whether these arguments ask for a run or a sweep, and not for a text about one."""
    asked = get_args_parser().parse_intermixed_args(argv)
    other = (asked.help, asked.hydra_help, asked.cfg, asked.info, asked.shell_completion)
    return not any(other)


def several_values(error: Exception, argv: list[str]) -> ConfigError | None:
    """Explains `seed=1,2` without `-m`, for which Hydra has words of its own; None for any other error.

    Args:
        argv: What the user typed.
    """
    found = _SEVERAL.search(str(error))
    if found is None:
        return None
    key, value = key_of(found.group(1)), found.group(1).partition("=")[2]
    if takes_a_list(key) and "(" not in value:
        why, fix = "a list is written in brackets", f"run with {shlex.quote(f'{key}=[{value}]')}"
        return ConfigError(key, value, why, expected="one list", fix=fix)
    if re.fullmatch(r"-?0,0\d+", value):  # no sweep: nobody writes 1 as 001
        fix = f"{key}={value.replace(',', '.')}"
        return ConfigError(key, value, "a comma is between values", expected="a decimal point", fix=fix)
    why, fix = "several values are a sweep, a job for each", f"run {shlex.join([*cli.typed(), '-m', *argv])}"
    return ConfigError(key, value, why, expected="one value, or -m", fix=fix)


def config_flags(argv: list[str]) -> list[str]:
    """Returns the flags that choose where configs are read from, with absolute folders."""
    parsed = get_args_parser().parse_args(argv)
    flags = []
    if parsed.config_path:
        flags += ["--config-path", parsed.config_path]
    if parsed.config_dir:
        flags += ["--config-dir", str(Path(parsed.config_dir).absolute())]
    if parsed.config_name:
        flags += ["--config-name", parsed.config_name]
    return flags


def with_config_path(argv: list[str]) -> list[str]:
    """Returns the arguments with an absolute `--config-path`; it is relative to the file that was started, if any."""
    given = get_args_parser().parse_intermixed_args(argv).config_path
    if given is None or "://" in given:
        return argv
    folder = Path() if cli.installed() else Path(sys.argv[0]).parent
    return [*argv, "--config-path", str((folder / given).resolve())]  # the last one counts


def with_latest(argv: list[str]) -> list[str]:
    """Returns the arguments with folders in place of `latest`, see `tracking.latest`.

    Raises:
        ConfigError: there is no run, no sweep, or no checkpoint in the run.
    """
    named = {key_of(part): value_of(part) for part in argv if "=" in part}
    logs = Path(named.get("paths.log_dir", latest.LOGS))
    found = {}
    for key in ("resume", "resume_sweep", "initial_weights"):
        value = named.get(key, "")
        if Path(value).name == latest.WORD:
            find = latest.sweep if key == "resume_sweep" else latest.run
            found[key] = find(value, key=key, logs=logs)
    if "initial_weights" in found and found["initial_weights"] != Path(named["initial_weights"]):
        there = checkpoints(found["initial_weights"])
        if not there:
            why, expected = "the newest run has no checkpoint", "a run with checkpoints"
            raise ConfigError(
                "initial_weights", latest.WORD, why, expected=expected, fix="initial_weights=<folder>"
            )
        found["initial_weights"] = there[-1]
    return [f"{key}={quoted(found[key])}" if (key := key_of(part)) in found else part for part in argv]


def refuse_study(hydra: Any, argv: list[str]) -> None:
    """Refuses to run one arm of a study, an experiment that says itself what is swept.

    Args:
        hydra: The composed `hydra` part of a single run.
        argv: What the user typed.

    Raises:
        ConfigError: a key that the study varies has no value of its own on the command line.
    """
    varied = dict(hydra.sweeper.get("params") or {})
    given = {key_of(part) for part in hydra.overrides.task}
    if not varied.keys() - given:
        return
    name = hydra.runtime.choices.get("experiment")
    why, fix = (
        f"a study of {', '.join(varied)}, a job for each",
        f"run {shlex.join([*cli.typed(), '-m', *argv])}",
    )
    raise ConfigError("experiment", name, why, expected="-m, or a value for each of them", fix=fix)


def key_of(override: str) -> str:
    """Returns what an override sets: `+a.b=1` sets `a.b`."""
    return override.lstrip("+~").partition("=")[0]


def value_of(override: str) -> str:
    """Returns the value of an override without the quotes around it."""
    value = override.partition("=")[2]
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1].replace(f"\\{value[0]}", value[0])
    return value


def quoted(value: object) -> str:
    """Returns a text quoted for Hydra's override grammar; folders may hold `=`, `,`, spaces and quotes."""
    return "'" + str(value).replace("'", "\\'") + "'"


def without_null(argv: list[str]) -> list[str]:
    """Hydra takes no null for a group; for these it has a plain meaning."""
    nothing = ("experiment=null", "arm=null")
    return ["logger=none" if part == "logger=null" else part for part in argv if part not in nothing]


def swept(overrides: Iterable[str], typed: Iterable[str]) -> list[str]:
    """Returns the overrides of a job that tell it from the other jobs of its sweep, as far as names say it.

    Args:
        overrides: Overrides of the job.
        typed: Overrides of the sweep. One that is the same there was not swept.
    """
    same = {(key_of(part), _squeezed(value_of(part))) for part in typed}
    told = [part for part in overrides if (key_of(part), _squeezed(value_of(part))) not in same]
    return [
        part for part in told if not any(f"{key_of(part)}.".startswith(f"{key}.") for key in _NEVER_IN_NAMES)
    ]


def _squeezed(value: str) -> str:
    """A value as it compares: Hydra writes `1e-3` as 0.001 and `false` as False."""
    plain = re.sub(r"[\s'\"]+", "", value).lower()
    try:
        return repr(float(plain))
    except ValueError:
        return plain


def of_task(hydra: Any) -> list[str]:
    """Returns the overrides of a run; what names a variable of the environment stays as it was typed."""
    raw: Any = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    return [part if "oc.env" in part else str(hydra.overrides.task[place]) for place, part in enumerate(raw)]


def job_label(overrides: Iterable[str]) -> str:
    """Returns the part of a sweep folder's name that tells jobs apart: last part of each swept key, and value.

    A key and its value are there as a whole or not at all: the number of the job in front of them is its name.
    """
    # They come evaluated; what comes from the environment is no part of a name.
    names = {key_of(part) for part in sys.argv[1:] if "oc.env" in part}
    told = swept((part for part in overrides if key_of(part) not in names), sys.argv[1:])
    parts = [f"{re.split('[./]', key_of(part))[-1]}-{value_of(part)}" for part in told]
    plain = [re.sub(r"[^A-Za-z0-9_.+-]+", "-", part) for part in parts]
    return "_".join(as_many_as_fit(plain, LONGEST_NAME)).strip("-")


def as_many_as_fit(parts: Sequence[str], limit: int) -> list[str]:
    """Returns the first parts that have at most `limit` characters with one between them; `...` where some are left."""
    kept: list[str] = []
    for part in parts:
        if len("_".join([*kept, part])) > limit - 4:
            return [*kept, "..."]
        kept.append(part)
    return kept
