"""What a new command line takes over from a folder that was started earlier: known keys of ours, as data.

The folder may come from anybody. What could run something is only ever typed: `hydra.*`, which makes Hydra build
callbacks and read other folders, flags, and `trusted_targets`.
"""

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from sidestream.config.errors import ConfigError
from sidestream.config.schema import SCHEMAS, Root
from sidestream.config.trust import KEY
from sidestream.tracking.untrusted import printable

_GROUPS = {*SCHEMAS, "experiment", "arm"}
_KEYS = ({*Root.__dataclass_fields__} | _GROUPS) - {"resume", KEY}
_OVERRIDE = re.compile(
    r"[+]{0,2}~?(?P<root>\w+)(?P<path>([./]\w[\w-]*)*)(@(?P<package>\w+)[\w.]*)?(=(?P<value>.*))?", re.DOTALL
)
_REFERENCE = re.compile(r"\$\{[\w.]+\}")  # to another key; anything else in ${...} would be evaluated


def take(parts: Sequence[str], *, folder: Path, option: str) -> list[str]:
    """Returns the overrides of a folder that are taken over, and says in one line which are not.

    Args:
        parts: The config's parts as they are in the folder, without those that the command line sets anew.
        option: What the user typed the folder for, such as `resume`.
    """
    left = [part for part in parts if not _is_data(part)]
    if left:
        words = " ".join(shlex.quote(part) for part in left)
        why = "only a command line may say that, so type it again if you trust it"
        print(
            f"note: {option}={printable(folder)} leaves out {printable(words)}: {why}",
            file=sys.stderr,
            flush=True,
        )
    return [part for part in parts if part not in left]


def refuse_flags(flags: Sequence[str], given: Sequence[str], *, folder: Path, option: str) -> None:
    """Does not take over where configs are read from; a run that was started with such a flag needs it typed.

    Args:
        flags: Flags that the folder's run was started with.
        given: Flags of this command line.

    Raises:
        ConfigError: the folder has flags and the command line none.
    """
    if flags and not given:
        words = shlex.join(flags)
        why = f"it was started with {words}, which only a command line may say"
        raise ConfigError(
            option, folder, why, expected="these flags beside it", fix=f"run with {words} if you trust it"
        )


def _is_data(part: str) -> bool:
    found = _OVERRIDE.fullmatch(part)
    if found is None or not {found["root"], found["package"] or found["root"]} <= _KEYS:
        return False
    value = found["value"] or ""
    names_file = "/" in found["path"] or (not found["path"] and found["root"] in _GROUPS)
    return "${" not in _REFERENCE.sub("", value) and not (names_file and ".." in value)


__all__ = ["refuse_flags", "take"]
