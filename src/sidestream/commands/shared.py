"""What the commands with options of their own share: help, Ctrl-C, errors in one line."""

import argparse
import errno
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from sidestream import cli
from sidestream.config.errors import ConfigError, is_of_place
from sidestream.launch import status, terminal
from sidestream.tracking.untrusted import Unreadable, printable

WIDTH = 100


def parser(doc: str | None, *, whole: bool = False, **options: Any) -> argparse.ArgumentParser:
    """Returns a parser whose help is at most 100 columns wide.

    Args:
        doc: The command's docstring.
        whole: Show all of it, as it is written, not the first line only.
        options: Further arguments of ArgumentParser.
    """
    style = argparse.RawDescriptionHelpFormatter if whole else argparse.HelpFormatter
    # argparse itself leaves two columns of the terminal free.
    form: Any = partial(style, width=min(WIDTH, shutil.get_terminal_size().columns - 2))
    text = cli.spelled((doc or "").strip())
    description = text if whole else text.partition("\n")[0]
    # None: argparse takes the name of the file.
    name = " ".join(cli.typed()) if cli.installed() else None
    return argparse.ArgumentParser(prog=name, description=description, formatter_class=form, **options)


def command_line(file: str, argv: list[str] | None) -> str:
    """Returns what a measurement records as its command.

    Args:
        file: In the repository, such as `scripts/bench_layer.py`.
        argv: None: the arguments of this process.
    """
    return cli.spelled(shlex.join(["python", file, *(sys.argv[1:] if argv is None else argv)]))


def number(low: float, high: float = 1e9, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """Returns a `type` for an argument that is a number in a range; argparse refuses others in one line."""

    def read(text: str) -> float:
        value = kind(text)
        if not low <= value <= high:  # nan is in none
            raise argparse.ArgumentTypeError(f"{text}: expected a number from {low:g} to {high:g}")
        return value

    read.__name__ = kind.__name__  # in argparse's own message
    return read


def add_torchrun(parser: argparse.ArgumentParser) -> None:
    """Adds what measurements take where ranks exist already."""
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="under torchrun only"
    )
    parser.add_argument(
        "--timeout",
        type=number(1, 1e6, float),
        default=300,
        metavar="S",
        help="of the collectives, under torchrun",
    )


def check_place(file: Path | None) -> None:
    """Makes the folder of a file that is written later, after minutes of measuring.

    Raises:
        OSError: it cannot be written.
    """
    if file is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))


def run(main: Callable[[], int | None], *, shows_status: bool = False) -> NoReturn:
    """Ends the process with what `main` returns: 130 after Ctrl-C, 2 for an error of the user's, each in one line.

    Args:
        shows_status: What `main` says through `launch.status` is shown on stderr.
    """
    terminal.outlive(hangup=False)
    # From here on there may be something to clean up, so it is an exception.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if shows_status:
        status.begin(sys.stderr)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        line, code = "interrupted", 130
    except (ConfigError, Unreadable) as error:
        line, code = printable(error, limit=2000), 2
    except OSError as error:
        if not is_of_place(error):
            raise
        line, code = ": ".join(str(part) for part in (error.filename, error.strerror) if part), 2
    finally:
        status.end()
    print(f"error: {line}", file=sys.stderr, flush=True)
    sys.exit(code)
