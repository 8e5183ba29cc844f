"""Command lines: taking them apart and writing values that Hydra reads back unchanged."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from hydra._internal.utils import get_args_parser  # the only place that knows Hydra's flags


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Returns (flags with their values, overrides) of the arguments after the script's name."""
    overrides = get_args_parser().parse_args(argv).overrides
    return [part for part in argv if part not in overrides], overrides


def config_flags(argv: list[str]) -> list[str]:
    """Returns the flags that choose where configs are read from, with absolute folders."""
    parsed = get_args_parser().parse_args(argv)
    flags = []
    if parsed.config_path:
        flags += ["--config-path", parsed.config_path]  # relative to the script, not to the current folder
    if parsed.config_dir:
        flags += ["--config-dir", str(Path(parsed.config_dir).absolute())]
    if parsed.config_name:
        flags += ["--config-name", parsed.config_name]
    return flags


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


def script() -> str:
    """Returns the absolute path of the script that was started."""
    return str(Path(sys.argv[0]).absolute())


def job_label(overrides: Iterable[str]) -> str:
    """Returns the part of a sweep folder's name that tells jobs apart: last part of each key, and value."""
    told = [part for part in overrides if key_of(part) != "name"]  # in the folder above already
    parts = [f"{re.split('[./]', key_of(part))[-1]}-{value_of(part)}" for part in told]
    return re.sub(r"[^A-Za-z0-9_.+-]+", "-", "_".join(parts)).strip("-.")[:120]
