"""Times dispatch and combine, forward and backward, of several dispatchers on identical routing.

python scripts/bench_dispatch.py --arms nccl_ep alltoall nccl_ep,dispatcher.capacity_factor=1.25

starts CPU ranks on this machine, over gloo. On GPUs, with ranks that exist already, over NCCL
and the libraries:

    torchrun --nproc-per-node 8 scripts/bench_dispatch.py --shapes 4096,7168,2048,256,8 --out a.json

Libraries that cannot be installed together are measured in an environment each and put together
with `--merge`.
What is measured, and what not to conclude from it: docs/dispatch_benchmark.md.
"""

import argparse
import json
import os
import platform
import sys
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from sidestream.commands import shared
from sidestream.config.availability import LIBRARIES
from sidestream.config.place import CONF
from sidestream.launch import torchrun
from sidestream.measure import environment, instrument
from sidestream.measure.dispatch_merge import decide, in_words, merge
from sidestream.measure.dispatch_report import add_statistics, draw, print_tables, transports
from sidestream.measure.ranks import Failed, run_ranks
from sidestream.measure.shapes import Case, listed, parse_case
from sidestream.predict.calibration import cpu_row, yaml_of
from sidestream.report.table import say
from sidestream.tracking.folder import write_json_atomic, write_text_atomic

MODULE = "sidestream.measure.dispatch"
CALIBRATED_RANKS = 2
ROUTINGS = ("uniform", "zipf", "one_rank")
ARMS = ("nccl_ep", "deep_ep", "hybrid_ep", "alltoall", "allgather", "nccl_ep,dispatcher.capacity_factor=1.25")
PACKAGES = ("nccl-extensions", "nccl4py", "deep_ep", "nvidia-nccl-cu13", "nvidia-nccl-cu12")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = shared.parser(__doc__, whole=True, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--shapes",
        nargs="+",
        default=["C@2"],
        metavar="SHAPE[@RANKS]",
        help=f"names or T,H,F,E,K with T tokens per rank; one rank unless @2 is added; under torchrun all ranks "
        f"(default C@2; {listed()})",
    )
    add(
        "--arms",
        nargs="+",
        default=list(ARMS),
        metavar="DISPATCHER[,OVERRIDE...]",
        help=f"overrides as for train.py; ratios are to the first (default: {' '.join(ARMS)})",
    )
    add(
        "--floors",
        nargs="+",
        default=None,
        metavar="ARM",
        help="arms whose transfers are timed alone too, ours and bare ones (default: the first arm); none",
    )
    add("--routing", nargs="+", choices=ROUTINGS, default=list(ROUTINGS))
    add("--dtype", choices=("bf16", "fp32"), default="bf16")
    add("--rounds", type=int, default=12, help="rounds that count, each with fresh routing (default 12)")
    add("--warmup", type=int, default=2, help="rounds before them that do not (default 2)")
    add("--starts", type=int, default=1, help="process starts; under torchrun always one (default 1)")
    add("--seed", type=shared.number(0, 2**63 - 1), default=1234)
    add("--against", metavar="ARM", help="ratios to this arm instead of the first")
    add(
        "--compare",
        nargs=2,
        action="append",
        default=[],
        metavar="ARM",
        help="say whether the first is faster than the second, by the rule of the page; may be repeated",
    )
    add("--skip-missing", action="store_true", help="leave out arms that cannot run here instead of ending")
    shared.add_torchrun(parser)
    add(
        "--malloc",
        choices=("keep", "default"),
        default="keep",
        help="keep: freed memory stays in the process",
    )
    add(
        "--calibrate",
        action="store_true",
        help="measure what predict.py asks of a CPU instead: --out, and a cluster option beside it (.yaml)",
    )
    add(
        "--merge",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="measure nothing: put results of the same routing, host and commit together",
    )
    add("--out", type=Path, default=Path("logs/bench_dispatch.json"), help="JSON; the picture lies beside it")
    return checked(parser, parser.parse_args(argv))


def checked(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> argparse.Namespace:
    """Ends the program where options do not go together; fills in what follows from others."""
    if parsed.rounds < 1 or parsed.warmup < 0 or parsed.starts < 1:
        parser.error("--rounds and --starts must be at least 1, --warmup at least 0")
    if torchrun.active() and parsed.starts > 1:
        parser.error("--starts: one start is one torchrun; start it again and --merge the results")
    if parsed.floors is None:
        parsed.floors = parsed.arms[:1]
    elif parsed.floors == ["none"]:
        parsed.floors = []
    return parsed


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    shared.check_place(options.out)
    command = shared.command_line("scripts/bench_dispatch.py", argv)
    try:
        if options.calibrate:
            return calibrate(options, command=command)
        if options.merge:
            results = {str(path): json.loads(path.read_text(encoding="utf-8")) for path in options.merge}
            return finish(merge(results), options)
        cases = parse_shapes(options.shapes)
        check_names(options)
        code = environment.code()  # of all starts, whatever happens to the files meanwhile
        found = [
            measure(options, cases, start, command=command, code=code) for start in range(options.starts)
        ]
        if torchrun.follows():
            return 0
        return finish(merge({f"start {number}": one for number, one in enumerate(found)}), options)
    except (ValueError, Failed, OSError) as error:
        if not torchrun.follows():
            print(f"error: {error}", file=sys.stderr)
        return 1


def parse_shapes(texts: list[str]) -> list[Case]:
    """Under torchrun every case has its ranks.

    Raises:
        ValueError: A text is no case, or asks for another number of ranks than there are.
    """
    if not torchrun.active():
        return [parse_case(text) for text in texts]
    ranks = torchrun.world()["world_size"]
    cases = [parse_case(text if "@" in text else f"{text}@{ranks}") for text in texts]
    for text, case in zip(texts, cases):
        if case.world_size != ranks:
            raise ValueError(f"shape={text}: torchrun started {ranks} ranks; leave out @{case.world_size}")
    return cases


def check_names(options: argparse.Namespace) -> None:
    """Whatever names an arm names one that is asked for.

    Raises:
        ValueError: It does not, or an arm is there twice.
    """
    if len(set(options.arms)) < len(options.arms):
        raise ValueError("arms: the same twice; expected each once")
    floors = [f"{kind} of {name}" for name in options.floors for kind in ("exchange", "bare")]
    against = [] if options.against is None else [options.against]
    for key, names, known in (
        ("floors", options.floors, options.arms),
        ("against", against, [*options.arms, *floors]),
        ("compare", [name for pair in options.compare for name in pair], [*options.arms, *floors]),
    ):
        for name in names:
            if name not in known:
                raise ValueError(f"{key}={name}: expected one of {', '.join(known)}")


def measure(
    options: argparse.Namespace, cases: list[Case], start: int, *, command: str, code: dict[str, Any]
) -> dict[str, Any]:
    """One start: the result without statistics."""
    head = instrument.begin("dispatch", command=command, packages=PACKAGES)
    groups = []
    for world_size in sorted({case.world_size for case in cases}):
        plain = job(options, [case for case in cases if case.world_size == world_size], start)
        if torchrun.active():
            from sidestream.measure.existing import run_here  # brings torch

            groups.append(run_here(plain, module=MODULE, device=options.device, timeout_s=options.timeout))
        else:
            groups.append(run_ranks(plain, world_size=world_size, module=MODULE))
    head, results = instrument.end(head), [record for group in groups for record in group["records"]]
    whole = ("schema_version", "benchmark", "status", "load_average")
    return {
        **{name: head[name] for name in whole},
        **code,
        "host": ",".join(groups[0].get("hosts", [platform.node()])),
        "device": groups[0].get("device", "cpu"),
        "transport": transports({"results": results}),
        "link": "native",
        "precision": options.dtype,
        "seed": options.seed,
        "rounds": options.rounds,
        "warmup_rounds": options.warmup,
        "starts": 1,
        "pinned": all(group["pinned"] for group in groups),
        "memory_kept": all(group["memory_kept"] for group in groups),
        # Results of several starts and machines can be one: what is of one of them stands here.
        "environments": [
            {
                "id": uuid.uuid4().hex[:12],
                "nccl": groups[0].get("nccl"),
                **{
                    name: head[name]
                    for name in head
                    if name not in ("schema_version", "benchmark", "status", *code)
                },
            }
        ],
        "results": results,
    }


def job(options: argparse.Namespace, cases: list[Case], start: int) -> dict[str, Any]:
    """`measure.dispatch.Job` in plain types, and `malloc`."""
    return {
        "shapes": [asdict(case.shape) for case in cases],
        "routings": options.routing,
        "arms": options.arms,
        "floors": options.floors,
        "dtype": options.dtype,
        "rounds": options.rounds,
        "warmup": options.warmup,
        "seed": options.seed,
        "order_seed": options.seed + start,
        "conf": str(CONF),
        "strict": not options.skip_missing,
        "malloc": options.malloc,
    }


def calibrate(options: argparse.Namespace, *, command: str) -> int:
    """Measures two ranks of this machine, prints and writes the row of `conf/cluster/`.

    Raises:
        ValueError: Under torchrun, or the times make no sense.
    """
    if torchrun.active():
        raise ValueError("--calibrate: measures the CPU ranks that it starts itself; run it without torchrun")
    head = instrument.begin("calibration", command=command)
    plain = {
        "conf": str(CONF),
        "seed": options.seed,
        "rounds": options.rounds,
        "warmup": options.warmup,
        "layers": 2 * options.rounds,
        "malloc": options.malloc,
    }
    found = run_ranks(plain, world_size=CALIBRATED_RANKS, module="sidestream.measure.calibrate")
    raw = found["records"][0]
    row = cpu_row(raw)
    result = instrument.end(
        head,
        device="cpu",
        rounds=options.rounds,
        pinned=found["pinned"],
        memory_kept=found["memory_kept"],
        emulated=["all ranks on one machine, gloo over the loopback"],
        row=row,
        measured=raw,
    )
    text = yaml_of(
        row,
        ranks=raw["ranks"],
        memory_gb=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / raw["ranks"] / 1e9),
        command=command,
        facts=f"{head['cpu']}, torch {head['versions'].get('torch')}, commit {str(head['commit'])[:12]}",
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(options.out, result)
    write_text_atomic(options.out.with_suffix(".yaml"), text)
    print(text)
    print(options.out, options.out.with_suffix(".yaml"))
    return 0


def emulated(result: dict[str, Any]) -> list[str]:
    """What stands in for something else."""
    found = ["all ranks on one machine, gloo over the loopback"] if result["device"] == "cpu" else []
    names = {
        name.partition(",")[0]
        for record in result["results"]
        for name, arm in record["arms"].items()
        if arm["transport"] == "torch"
    }
    if replaced := sorted(names & LIBRARIES.keys()):
        found.append(f"{', '.join(replaced)} by the same contract on torch.distributed")
    return found


def finish(result: dict[str, Any], options: argparse.Namespace) -> int:
    """Adds the figures, writes, draws and prints."""
    result["transport"], result["emulated"] = transports(result), emulated(result)
    for record in result["results"]:
        add_statistics(record, against=options.against)
    result["comparisons"] = [decide(one, *pair) for pair in options.compare for one in result["results"]]
    instrument.write(result, options.out, show, draw)
    return 0


def show(result: dict[str, Any], console: Console) -> None:
    print_tables(result, console)
    for one in result["comparisons"]:
        say(in_words(one), console)


def run() -> NoReturn:
    shared.run(main)
