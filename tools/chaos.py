"""Kills and stops training runs at random moments and counts what becomes of them: `make chaos`.

    python tools/chaos.py --runs 20 --seed 3 --out chaos/3

Each run has a random choice of dispatcher, overlap, fusion, graph, strategy and number of ranks, and meets one fault: a
signal to a rank, to the starting process, or to all of them at once, in a random phase. Then it is resumed as often as
it takes, and its losses and final weights are compared, bit for bit, with a run of the same choice that nobody touched.
Runs that other pieces (`--seed`) made are left alone; `--report` adds pieces up.

Exit code: 0 if every run ended in time, told the truth, left nothing behind and went on bit-identically.
"""

from __future__ import annotations

if __name__ == "__main__":
    from sidestream import interrupt

    interrupt.leave_at_once()

import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sidestream.commands import shared
from sidestream.launch import phase
from sidestream.launch.silence import look_at

TRAIN = Path(__file__).parents[1] / "train.py"
TIMEOUT = 20  # strategy.timeout_seconds
STEPS = 14
BASE = [
    "model.hidden_size=32",
    "model.num_layers=3",
    "model.num_experts=4",
    "data.seq_length=16",
    "data.global_batch_size=8",
    f"trainer.max_steps={STEPS}",
    "trainer.val_check_interval=4",
    "trainer.limit_val_batches=3",
    "trainer.log_every_n_steps=1",
    "trainer.pin_cpu=false",
    "callbacks.checkpoint.every_n_steps=3",
    "scheduler.warmup_steps=2",
    f"strategy.timeout_seconds={TIMEOUT}",
]
# A dozen combinations, so that each needs one undisturbed run only; on one rank without what needs two.
CHOICES: list[list[str]] = [
    [],
    ["dispatcher=allgather", "balance=bias"],
    ["dispatcher.capacity_factor=2.0", "strategy=fully_shard"],
    ["overlap=chunked", "balance=bias"],
    ["overlap=two_batch", "strategy=fully_shard"],
    ["overlap=shared_expert", "model.num_shared_experts=1"],
    ["fusion=mega", "balance=bias"],
    ["dispatcher.capacity_factor=2.0", "graph=step"],
    ["dispatcher.capacity_factor=2.0", "graph=step", "balance=bias"],
    ["strategy=fully_shard", "balance=bias"],
    ["strategy.expert_parallel_size=1"],
    ["fusion=mega", "strategy.expert_parallel_size=1"],
]
SIGNALS = ["SIGKILL", "SIGTERM", "SIGINT", "SIGSTOP"]
TARGETS = ["rank", "parent", "all"]
PHASES = [
    phase.STARTING,
    phase.READING,
    phase.MEETING,
    phase.BUILDING,
    phase.TRAINING,
    phase.VALIDATING,
    phase.SAVING,
]
ENDS = [phase.FINISHING, phase.LEAVING]
SECONDS_TO_START = 240.0
SECONDS_PER_RUN = 300.0


@dataclass
class Case:
    """One run and its fault.

    Attributes:
        step: Of a phase that has one; the fault comes at this one or later.
        delay: Seconds after the phase was first seen.
    """

    number: int
    overrides: list[str]
    ranks: int
    signal: str
    target: str
    rank: int
    phase: str
    step: int
    delay: float


@dataclass
class Outcome:
    """What became of it. Times in seconds from the fault on."""

    case: Case
    hit: str = ""  # the phase in which it really came
    ended_after: float | None = None
    code: int | None = None
    status: str = ""
    error: str = ""
    left: list[str] = field(default_factory=list)
    resumes: int = 0
    identical: bool | None = None
    wrong: list[str] = field(default_factory=list)


def draw(number: int, seed: int, attempt: int = 0) -> Case:
    """The case with this number, always the same for a seed; another one for another attempt."""
    dice = random.Random(f"{seed} {number} {attempt}")
    overrides = dice.choice(CHOICES)
    ranks = dice.choice([1, 2, 2, 2])
    if ranks == 1:
        overrides = [word for word in overrides if not word.startswith(("strategy", "fusion=mega"))]
    return Case(
        number=number,
        overrides=overrides,
        ranks=ranks,
        signal=dice.choice(SIGNALS),
        target=dice.choice(TARGETS) if ranks > 1 else "parent",
        rank=dice.randrange(ranks),
        phase=dice.choice(PHASES + ENDS),
        step=dice.randrange(1, STEPS),
        delay=dice.choice([0.0, 0.0, 0.02, 0.2, 1.0]),
    )


class Job:
    """A started train.py with a temporary folder of its own."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.folder = folder
        self.temporary = folder.with_name(f"{folder.name}.tmp")
        self.temporary.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        with folder.with_name(f"{folder.name}.out").open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(TRAIN), *arguments],
                env=environment,
                cwd=folder.parent,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def shared(self) -> Path | None:
        """The folder in which the ranks say their phase, once it is there."""
        return next((path for path in self.temporary.glob("sidestream-*") if path.is_dir()), None)

    def phases(self, ranks: int) -> dict[int, phase.Phase]:
        shared = self.shared()
        return {} if shared is None else {rank: phase.read(shared, rank) for rank in range(ranks)}

    def members(self) -> list[int]:
        """Process ids of everything that has this job's temporary folder in its environment, zombies left out."""
        mark, found = f"TMPDIR={self.temporary}\0".encode(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes() + b"\0":
                        found.append(int(entry.name))
        return found

    def end(self) -> None:
        """Kills what is still there."""
        for pid in self.members():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=20)


def wait_for(job: Job, case: Case) -> str:
    """Waits for the moment of the fault; returns the phase it found, or why it never came."""
    limit = time.monotonic() + SECONDS_TO_START
    while job.process.poll() is None and time.monotonic() < limit:
        now = job.phases(case.ranks).get(case.rank)
        if now is not None and now.pid:
            order = [*PHASES, *ENDS]
            there = now.name == case.phase and (now.step is None or now.step >= case.step)
            past = now.name in ENDS and order.index(now.name) > order.index(case.phase)
            if there or past:
                time.sleep(case.delay)
                return str(job.phases(case.ranks).get(case.rank, now))
        time.sleep(0.002)
    return "ended before" if job.process.poll() is not None else "never there"


def strike(job: Job, case: Case) -> None:
    """Sends the signal."""
    parent = job.process.pid
    ranks = {rank: now.pid for rank, now in job.phases(case.ranks).items() if now.pid}
    targets = {
        "rank": [ranks.get(case.rank, parent)],
        "parent": [parent],
        "all": [parent, *(pid for pid in ranks.values() if pid != parent)],
    }[case.target]
    for pid in targets:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, getattr(signal, case.signal))


def limit_of(case: Case, hit: phase.Phase | None) -> float:
    """Seconds within which a job has to end, as documented, and some for a busy machine."""
    busy = 30.0
    if case.signal == "SIGSTOP":
        return (hit.limit if hit is not None else 120.0) + busy
    return 25.0 + busy


def go(case: Case, out: Path, whole: Path) -> Outcome:
    """Runs one case to its end; `whole` is the undisturbed run of the same choice."""
    folder = out / f"run{case.number:03}"
    outcome = Outcome(case)
    choices = [*BASE, *case.overrides, f"trainer.devices={case.ranks}"]
    job = Job(folder, [*choices, f"hydra.run.dir={folder}"])
    try:
        outcome.hit = wait_for(job, case)
        hit = job.phases(case.ranks).get(case.rank)
        struck = time.monotonic()
        strike(job, case)
        frozen = case.signal == "SIGSTOP" and case.target != "rank"
        if frozen:  # nobody is left to notice; when it goes on nothing may have happened
            time.sleep(3.0)
            for pid in job.members():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
        limit = SECONDS_PER_RUN if frozen else limit_of(case, hit)
        try:
            outcome.code = job.process.wait(timeout=limit)
            outcome.ended_after = time.monotonic() - struck
        except subprocess.TimeoutExpired:
            outcome.wrong.append(f"did not end within {limit:.0f} s")
        _settle(job, outcome, case, folder)
    finally:
        job.end()
    _resume(case, outcome, folder, choices)
    _compare(outcome, folder, whole)
    return outcome


def _settle(job: Job, outcome: Outcome, case: Case, folder: Path) -> None:
    """What is left behind, and whether result.json tells the truth."""
    time.sleep(0.5)
    outcome.left += [f"process {pid}" for pid in job.members() if look_at(pid) is not None]
    parent_killed = case.signal == "SIGKILL" and case.target != "rank"
    if not parent_killed:  # one that was killed cannot clean up: the next start does
        outcome.left += [path.name for path in job.temporary.glob("sidestream-*")]
    with contextlib.suppress(OSError, ValueError):
        result = json.loads((folder / "result.json").read_text())
        outcome.status, outcome.error = result["status"], result["error"] or ""
    expected = {0: "finished", 1: "failed", 130: "interrupted", 143: "interrupted"}.get(outcome.code or 0)
    if not parent_killed and outcome.code is not None and outcome.code >= 0 and outcome.status:
        if outcome.status != expected:
            outcome.wrong.append(f"exit code {outcome.code}, but status {outcome.status}")
        if (
            outcome.code == 1
            and case.target == "rank"
            and f"rank {case.rank}" not in outcome.error
            and case.ranks > 1
        ):
            outcome.wrong.append(f"the rank is not named: {outcome.error}")


def _resume(case: Case, outcome: Outcome, folder: Path, choices: list[str]) -> None:
    """Goes on until the run has finished: from its checkpoint, or from the start where there is none."""
    while outcome.resumes < 3:
        result = {}
        with contextlib.suppress(OSError, ValueError):
            result = json.loads((folder / "result.json").read_text())
        if result.get("status") == "finished":
            return
        outcome.resumes += 1
        if any((folder / "checkpoints").glob("step-*/")):
            arguments = [f"resume={folder}"]
        else:
            shutil.rmtree(folder, ignore_errors=True)
            arguments = [*choices, f"hydra.run.dir={folder}"]
        job = Job(folder, arguments)
        try:
            job.process.wait(timeout=SECONDS_PER_RUN)
        except subprocess.TimeoutExpired:
            outcome.wrong.append("a resumed run did not end")
        finally:
            outcome.left += [path.name for path in job.temporary.glob("sidestream-*")]
            job.end()
    outcome.wrong.append(f"did not finish after {outcome.resumes} resumes")


def _compare(outcome: Outcome, folder: Path, whole: Path) -> None:
    outcome.left += [path.name for path in (folder / "checkpoints").glob(".*")]
    ours, theirs = records(folder), records(whole)
    same = ours == theirs and digest(folder) == digest(whole)
    outcome.identical = same and bool(ours)
    if not outcome.identical:
        first = next((step for step in sorted({*ours, *theirs}) if ours.get(step) != theirs.get(step)), None)
        outcome.wrong.append(f"not bit-identical, first at {first if first is not None else 'the weights'}")
    if outcome.left:
        outcome.wrong.append(f"left behind: {', '.join(outcome.left)}")


def records(folder: Path) -> dict[tuple[int, str], float]:
    """(step, name) -> loss of a run."""
    found: dict[tuple[int, str], float] = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            for name in ("train/loss", "val/loss", "train/grad_norm"):
                if name in record:
                    found[record["step"], name] = record[name]
    return found


def digest(folder: Path) -> str:
    """Of every tensor of the last checkpoint: weights and optimizer."""
    import torch

    if str(TRAIN.parent) not in sys.path:
        sys.path.insert(0, str(TRAIN.parent))
    from tests.train.fit import tensors

    found = hashlib.sha256()
    try:
        state = tensors(max((folder / "checkpoints").glob("step-*/")))
    except Exception as error:
        return f"unreadable: {type(error).__name__}: {error}"
    for name in sorted(state):
        found.update(name.encode() + state[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class References:
    """Undisturbed runs, one per choice, kept for other pieces."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, case: Case) -> Path | None:
        """The folder; None for a combination that train.py refuses."""
        name = "_".join([f"ranks{case.ranks}", *sorted(case.overrides)])
        place = self._folder / "".join(c if c.isalnum() or c in "._-" else "-" for c in name)
        result = place / "result.json"
        if not (result.exists() and json.loads(result.read_text())["status"] == "finished"):
            shutil.rmtree(place, ignore_errors=True)
            place.parent.mkdir(parents=True, exist_ok=True)
            arguments = [*BASE, *case.overrides, f"trainer.devices={case.ranks}", f"hydra.run.dir={place}"]
            job = Job(place, arguments)
            try:
                code = job.process.wait(timeout=SECONDS_PER_RUN)
            finally:
                job.end()
            if code == 2:
                return None
            if code:
                raise SystemExit(f"the undisturbed run {place} ended with {code}")
        return place


def report(outcomes: list[dict[str, Any]]) -> int:
    """Prints the figures; returns the exit code."""
    times = sorted(o["ended_after"] for o in outcomes if o["ended_after"] is not None and not _froze(o))
    stopped = sorted(t for t, o in ((o["ended_after"], o) for o in outcomes) if t is not None and _silent(o))
    quick = [t for t in times if t not in stopped]
    for what, found in (("killed or asked to stop", quick), ("a stopped rank", stopped)):
        if found:
            p95 = found[min(len(found) - 1, int(0.95 * len(found)))]
            print(
                f"ended, {what}: {len(found)} runs within {max(found):.1f} s (median {statistics.median(found):.1f}, "
                f"p95 {p95:.1f})"
            )
    bad = [o for o in outcomes if o["wrong"]]
    print(f"left behind: {sum(len(o['left']) for o in outcomes)}")
    print(f"resumed bit-identical: {sum(bool(o['identical']) for o in outcomes)} of {len(outcomes)}")
    for o in bad:
        case = o["case"]
        what = f"{case['signal']} to {case['target']} {case['rank']} in: {o['hit']}"
        print(f"WRONG #{case['number']} {what} ({' '.join(case['overrides'])}): {'; '.join(o['wrong'])}")
    print(f"{len(outcomes)} runs, {len(bad)} wrong")
    return int(bool(bad))


def _froze(outcome: dict[str, Any]) -> bool:
    return outcome["case"]["signal"] == "SIGSTOP" and outcome["case"]["target"] != "rank"


def _silent(outcome: dict[str, Any]) -> bool:
    return outcome["case"]["signal"] == "SIGSTOP" and outcome["case"]["target"] == "rank"


def main() -> int:
    parser = shared.parser(__doc__)
    parser.add_argument("--runs", type=shared.number(1), default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=shared.number(0), default=0, help="number of the first case")
    parser.add_argument("--out", type=Path, default=Path("chaos"), help="outcomes and what went wrong")
    parser.add_argument("--report", type=Path, nargs="*", help="only add up these outcomes.jsonl")
    options = parser.parse_args()
    if options.report:
        lines = [line for path in options.report for line in path.read_text().splitlines()]
        return report([json.loads(line) for line in lines])
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    references = References(out / "references")
    outcomes = []
    for number in range(options.first, options.first + options.runs):
        cases = (draw(number, options.seed, attempt) for attempt in itertools.count())
        case, whole = next((case, whole) for case in cases if (whole := references(case)) is not None)
        outcome = go(case, out, whole)
        outcomes.append(asdict(outcome))
        with (out / "outcomes.jsonl").open("a") as file:
            file.write(json.dumps(outcomes[-1]) + "\n")
        after = "-" if outcome.ended_after is None else f"{outcome.ended_after:.1f} s"
        told = "; ".join(outcome.wrong) or "ok"
        print(
            f"#{number:<3} {case.signal:8} {case.target:6} {case.rank} in: {outcome.hit:40.40} "
            f"{after:>8} code {outcome.code} {told}",
            flush=True,
        )
        if not outcome.wrong:
            for path in (f"run{number:03}", f"run{number:03}.tmp"):
                shutil.rmtree(out / path, ignore_errors=True)
    return report(outcomes)


if __name__ == "__main__":
    shared.run(main)
