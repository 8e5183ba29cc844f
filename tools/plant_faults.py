"""Plant the faults of tests/faults/*.toml one after another, and see that tests notice them.

    python tools/plant_faults.py                            all of them: about half an hour
    python tools/plant_faults.py --only routing model       two rooms
    python tools/plant_faults.py --first 20 --count 10      faults 20 to 29 of what was chosen
    python tools/plant_faults.py --outcomes faults.jsonl    go on where a run with this file ended

Nothing is planted into this checkout: the files that git knows, and new ones that it does not
ignore, are copied to a temporary folder. The named tests must pass there first, without any
fault. Then, for each fault, the text is replaced, the tests run, and the text is put back. Exit
code 0: every fault was caught.

A fault is `caught` if a test fails, or does not end within --limit seconds; `missed` if all pass;
`misplaced` if its old text is not in the file exactly once; `broken` if the tests could not be
run.
"""

if __name__ == "__main__":
    from sidestream import interrupt

    interrupt.leave_at_once()

import contextlib
import importlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from sidestream.commands import shared

REPOSITORY = Path(__file__).resolve().parents[1]
TABLES = Path("tests/faults")
FORK = multiprocessing.get_context("fork")
SECONDS = itertools.count(1)
# What takes seconds to import and is no part of the package.
PRELOADED = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "lightning.pytorch",
    "hydra",
    "hypothesis",
)


@dataclass(frozen=True)
class Fault:
    """An entry of a table.

    Attributes:
        room: The table's name, the part of `src/sidestream` that it is about.
        name: Unique within the room.
        file: Relative to the repository.
        old, new: What is replaced; `old` is in the file exactly once.
        wrong: What the fault does, in one line.
        tests: pytest ids of the tests that should fail.
    """

    room: str
    name: str
    file: str
    old: str
    new: str
    wrong: str
    tests: list[str]

    @property
    def title(self) -> str:
        return f"{self.room}/{self.name}"


def load_faults(repository: Path = REPOSITORY) -> list[Fault]:
    """All faults, in the order of rooms and of their tables."""
    tables = sorted((repository / TABLES).glob("*.toml"))
    return [
        Fault(room=table.stem, **entry)
        for table in tables
        for entry in tomllib.loads(table.read_text())["fault"]
    ]


def copy_checkout(target: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).is_file():  # not what is deleted and not yet committed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name)


def _in_child(copy: Path, output: int, arguments: list[str]) -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(copy)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path[:0] = [str(copy), str(copy / "src")]  # before the installed package
    os.environ["PYTHONPATH"] = str(copy / "src")  # also in what the tests start
    sys.exit(pytest.main(arguments))


def run_tests(copy: Path, tests: Sequence[str], limit: float, *options: str) -> tuple[int | None, str]:
    """pytest's exit code, None if it did not end in time, and what it printed. Nothing of it runs on.

    In a fork of this process, which has imported what is the same for all faults, and nothing of the package.
    """
    arguments = ["-q", "-p", "no:cacheprovider", *options, *tests]
    with tempfile.TemporaryFile("w+") as output:
        process = FORK.Process(target=_in_child, args=(copy, output.fileno(), arguments))
        process.start()
        assert process.pid is not None
        try:
            process.join(limit)
            code = process.exitcode
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and ranks that a test left behind
            process.join()
        output.seek(0)
        return code, output.read()


def write(path: Path, text: str) -> None:
    """With a time of its own: stored bytecode knows a file by its size and second."""
    path.write_text(text)
    second = next(SECONDS)
    os.utime(path, (second, second))


def plant(fault: Fault, copy: Path, limit: float) -> dict[str, object]:
    """Plant, test and put back; returns the outcome and why."""
    path = copy / fault.file
    text = path.read_text() if path.is_file() else ""
    if text.count(fault.old) != 1:
        return {
            "outcome": "misplaced",
            "why": f"the old text is {text.count(fault.old)} times in {fault.file}",
        }
    write(path, text.replace(fault.old, fault.new))
    try:
        code, printed = run_tests(copy, fault.tests, limit, "-x", "-rfE", "--tb=line")
    finally:
        write(path, text)
    if code in (1, None):
        failed = [line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR"))]
        why = failed[0] if failed else f"not over after {limit:.0f} s" if code is None else printed[-300:]
        return {"outcome": "caught", "why": why}
    if code == 0:
        return {"outcome": "missed", "why": f"all passed: {' '.join(fault.tests)}"}
    return {"outcome": "broken", "why": f"pytest ended with {code}: {printed[-1500:]}"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = shared.parser(__doc__, whole=True)
    parser.add_argument("--only", nargs="+", metavar="ROOM[/FAULT]", default=[])
    parser.add_argument("--first", type=int, default=1, help="number of the first fault, from 1")
    parser.add_argument("--count", type=int, help="how many")
    parser.add_argument("--outcomes", type=Path, help="JSON lines, one added for each fault")
    parser.add_argument("--planted-only", action="store_true", help="leave out the run without any fault")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for the tests of a fault")
    options = parser.parse_args(arguments)

    faults = load_faults()
    unknown = set(options.only) - {name for fault in faults for name in (fault.room, fault.title)}
    if unknown:
        print(
            f"--only {' '.join(sorted(unknown))}: expected one of {', '.join(sorted({f.room for f in faults}))}"
        )
        return 2
    faults = [f for f in faults if not options.only or {f.room, f.title} & set(options.only)]
    faults = faults[options.first - 1 :][: options.count]
    if options.outcomes is not None and options.outcomes.exists():
        lines = [json.loads(line) for line in options.outcomes.read_text().splitlines()]
        # As it is in the table now: one that was changed since is planted again.
        done = [line["fault"] for line in lines if line["outcome"] == "caught"]
        faults = [fault for fault in faults if vars(fault) not in done]

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is under way ends, the copy goes
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in tests/conftest.py, before torch is imported
    for name in PRELOADED:
        importlib.import_module(name)
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        copy = Path(folder) / "checkout"
        copy_checkout(copy)
        tests = sorted({test for fault in faults for test in fault.tests})
        print(f"{len(faults)} faults, {len(tests)} tests", flush=True)
        if tests and not options.planted_only:
            code, printed = run_tests(copy, tests, 60 + options.limit * len(tests))
            if code != 0:
                print(f"{printed[-6000:]}\nthey must pass before anything is planted")
                return 2
        for number, fault in enumerate(faults, start=1):
            began = time.monotonic()
            found = plant(fault, copy, options.limit)
            outcome = str(found["outcome"])
            counts[outcome] = counts.get(outcome, 0) + 1
            print(f"{number:4} {outcome:9} {time.monotonic() - began:5.0f} s  {fault.title}: {fault.wrong}")
            if outcome != "caught":
                print(f"     {found['why']}")
            sys.stdout.flush()
            if options.outcomes is not None:
                with options.outcomes.open("a") as file:
                    file.write(json.dumps({**found, "fault": vars(fault)}) + "\n")
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "nothing to plant")
    return int(any(outcome != "caught" for outcome in counts))


if __name__ == "__main__":
    sys.exit(main())
