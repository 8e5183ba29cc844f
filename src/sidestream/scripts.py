"""What the commands with options of their own (`scripts/`, `eval.py`) share: help, Ctrl-C, errors in one line."""

import argparse
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from sidestream.config.errors import ConfigError, is_of_place

WIDTH = 100


def parser(doc: str | None, *, whole: bool = False, **options: Any) -> argparse.ArgumentParser:
    """Returns a parser whose help is at most 100 columns wide.

    Args:
        doc: The script's docstring.
        whole: Show all of it, as it is written, not the first line only.
        options: Of ArgumentParser.
    """
    style = argparse.RawDescriptionHelpFormatter if whole else argparse.HelpFormatter
    # argparse itself leaves two columns of the terminal free.
    form: Any = partial(style, width=min(WIDTH, shutil.get_terminal_size().columns - 2))
    text = (doc or "").strip()
    description = text if whole else text.partition("\n")[0]
    return argparse.ArgumentParser(description=description, formatter_class=form, **options)


def run(main: Callable[[], int | None]) -> NoReturn:
    """Ends the process with what `main` returns: 130 after Ctrl-C, 2 for an error of the user's, each in one line."""
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # from here on there may be something to clean up
    try:
        code = main()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("\nerror: interrupted", file=sys.stderr, flush=True)
        sys.exit(130)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if not is_of_place(error):
            raise
        print(f"error: {': '.join(filter(None, (error.filename, error.strerror)))}", file=sys.stderr)
        sys.exit(2)
    sys.exit(code)
