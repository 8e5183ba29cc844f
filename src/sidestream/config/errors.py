"""The one exception for a wrong configuration, and errors of the file system that are one."""

import errno
from typing import TypeGuard

from sidestream.tracking.untrusted import printable

_LONGEST = 2000  # characters of a message


class ConfigError(ValueError):
    """A configuration that cannot run. `str()` is one line: `key=value: why; expected ...; set X=Y`.

    Args:
        key: What the user would type, such as `router.top_k`.
        value: What it was set to.
        why: What is wrong with it, naming the other numbers involved.
        expected: What would be right.
        fix: An override that helps (`router.top_k=2`), or a sentence where no override does.
    """

    def __init__(self, key: str, value: object, why: str, *, expected: str, fix: str) -> None:
        expected = expected.removeprefix("expected ")
        advice = f"set {fix}" if "=" in fix and not fix.startswith(("set ", "run ", "remove ")) else fix
        line = f"{key}={as_typed(value)}: {why}; expected {expected}; {advice}"
        super().__init__(printable(line, limit=_LONGEST))  # any part of it may be from somebody's file
        self.key = key
        self.value = value

    def __reduce__(self) -> tuple:
        # The default would call the class with the finished message, which has other arguments.
        return (_restore, (str(self), self.key, self.value))


def _restore(message: str, key: str, value: object) -> ConfigError:
    error = ConfigError.__new__(ConfigError)
    ValueError.__init__(error, message)
    error.key, error.value = key, value
    return error


def as_typed(value: object) -> str:
    """Returns `value` the way it is written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ",".join(as_typed(item) for item in value) + "]"
    return str(value)


class PlainError(Exception):
    """The end of a run that needs no traceback: the message says it all."""


# What the place that somebody named can do to whoever writes there.
_OF_PLACE = {
    errno.EACCES,
    errno.EDQUOT,
    errno.EEXIST,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_of_place(error: BaseException) -> TypeGuard[OSError]:
    """Whether an error says that nothing can be written in some place: no permission, no space, a file in the way."""
    if not isinstance(error, OSError) or error.errno not in _OF_PLACE:
        return False
    return error.filename is not None or error.errno in _FULL  # a write knows no name


def cannot_write(key: str, value: object, error: OSError) -> ConfigError:
    """Explains an error for which `is_of_place` holds, met below the folder `value` that `key` names."""
    where = "" if str(error.filename) in (str(value), "None") else f": {error.filename}"
    why = f"cannot be written ({error.strerror}{where})"
    return ConfigError(key, value, why, expected="a folder that you may write", fix=f"{key}=<folder>")
