"""`sidestream <command>`: the table of commands, and how the one that runs was called.

In the repository each command is a file, too: `python train.py`, `python scripts/compare.py`. What is shown to be
copied, or started again, is spelled as the user called it. Imports nothing that takes time.
"""

import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from sidestream import __version__, interrupt

# Name -> (module in sidestream.commands, what it does). A module has `run()`, which ends the process.
COMMANDS = {
    "train": ("train", "train a model, or with -m a sweep of models"),
    "eval": ("eval", "validation loss of a run, and a sample of what it writes"),
    "predict": ("predict", "what a step would take on a cluster that is not here"),
    "compare": ("compare", "the runs of a sweep side by side"),
    "plot-loss": ("plot_loss", "draw the losses of runs"),
    "plot-load": ("plot_load", "draw the load of the experts of a run"),
    "convert-hf": ("convert_hf", "Hugging Face checkpoints, in and out"),
    "doctor": ("doctor", "which options run on this machine, and what is missing"),
    "check-part": ("check_part", "does a part of yours keep its protocol?"),
    "check-gpu": ("check_gpu", "try the GPUs of this machine out"),
    "check-cluster": ("check_cluster", "check every dispatcher on these ranks, then time it"),
    "measure": ("measure_overlap", "what a schedule hides of the two all-to-alls"),
    "bench-layer": ("bench_layer", "time an MoE layer beside a dense one and other libraries"),
    "bench-dispatch": ("bench_dispatch", "time dispatch and combine of several dispatchers"),
    "bench-graph": ("bench_graph", "time training steps with and without a step graph"),
    "overlap-cost": ("overlap_cost", "what a schedule costs where there is nothing to hide"),
    "two-hosts": ("two_hosts", "run a command on two emulated hosts with a slow wire"),
}
OF_HYDRA = ("train", "predict", "measure")  # take overrides, and complete them
IN_THE_ROOT = ("train", "eval", "predict")  # their files; the others are in scripts/
CALLED = "SIDESTREAM_COMMAND"  # ranks inherit it; not there: a file was started
_SPELLED = re.compile(r"(python |torchrun [^\n]*?)?\b((?:scripts/)?\w+\.py)\b")


def main() -> NoReturn:
    """Runs the command that is named first: the entry point of the installed package."""
    interrupt.leave_at_once()
    name, sys.argv[1:] = (sys.argv[1:] or ["--help"])[0], sys.argv[2:]
    if name in ("-sc", "--shell-completion"):
        name = _completed(sys.argv[1:])
        sys.argv[1:1] = ["-sc"]
    if name in ("-h", "--help"):
        print(listing())
        sys.exit(0)
    if name == "--version":
        print(f"sidestream {__version__}")
        sys.exit(0)
    if name not in COMMANDS:
        from difflib import get_close_matches

        nearest = get_close_matches(name, COMMANDS, n=1, cutoff=0)[0]
        typed = name if name.isprintable() else repr(name)
        line = f"error: sidestream {typed}: no such command; the nearest is {nearest}, `sidestream` lists all"
        print(line, file=sys.stderr)
        sys.exit(2)
    os.environ[CALLED] = name
    _run(name)


def script(name: str) -> NoReturn:
    """Runs the command whose file was started."""
    interrupt.leave_at_once()
    os.environ.pop(CALLED, None)
    _run(name)


def _run(name: str) -> NoReturn:
    sys.exit(import_module(f"sidestream.commands.{COMMANDS[name][0]}").run())


def listing() -> str:
    """Returns every command with one line."""
    lines = [f"  {name:16}{line}" for name, (_, line) in COMMANDS.items()]
    return "\n".join(
        [
            "Trains mixture-of-experts language models with expert parallelism: sidestream <command> ...",
            "",
            *lines,
            "",
            "What a command takes: sidestream <command> --help",
        ]
    )


def _completed(words: list[str]) -> str:
    """Returns the command whose overrides a shell asks to complete; answers itself where there is none.

    The shell sends the whole line in COMP_LINE, and Hydra knows of one word in front of the overrides only.
    """
    line = os.environ.get("COMP_LINE", "")
    if not any(word.startswith("query=") for word in words):
        return "train"  # install=, uninstall=: the same for all
    _, _, rest = line.lstrip().partition(" ")
    name, space, rest = rest.lstrip().partition(" ")
    if not space:
        print(*(command for command in COMMANDS if command.startswith(name)))
    if name not in OF_HYDRA or not space:
        sys.exit(0)
    os.environ["COMP_LINE"] = f"sidestream {rest}"
    return name


def installed() -> bool:
    """Whether `sidestream <command>` was called, and not a file of the repository."""
    return CALLED in os.environ


def typed(*starter: str) -> list[str]:
    """Returns the words in front of what the user typed, as they can be copied.

    Args:
        starter: What starts it instead of `python`, such as torchrun and its flags.
    """
    name = os.environ.get(CALLED)
    if name is None:
        return [*(starter or ("python",)), os.path.relpath(sys.argv[0])]
    return [*starter, "-m", "sidestream", name] if starter else ["sidestream", name]


def again() -> list[str]:
    """Returns what starts this command in another process; without the current folder among the places of code."""
    name = os.environ.get(CALLED)
    if name is None:
        return [sys.executable, os.path.abspath(sys.argv[0])]
    return [sys.executable, "-P", "-m", "sidestream", name]


def module() -> str:
    """Returns the name of the command's module, which is that of its file and of its config."""
    name = os.environ.get(CALLED)
    return Path(sys.argv[0]).stem if name is None else COMMANDS[name][0]


def spelled(text: str) -> str:
    """Returns a text in which commands are spelled as this one was: `python train.py`, or `sidestream train`."""
    if not installed():
        return text
    names = {
        f"{'' if name in IN_THE_ROOT else 'scripts/'}{module}.py": name
        for name, (module, _) in COMMANDS.items()
    }

    def of_the_package(found: re.Match[str]) -> str:
        starter, file = found.group(1) or "", found.group(2)
        if file not in names:
            return found.group()
        return (
            f"{starter}-m sidestream {names[file]}" if "torchrun" in starter else f"sidestream {names[file]}"
        )

    return _SPELLED.sub(of_the_package, text)
