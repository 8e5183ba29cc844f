"""Times one MoE layer, forward and backward, against a dense one of equal FLOPs and published ones.

python scripts/bench_layer.py --shapes A B C D E A@2 B@2 --peers all

Peers live in an extra, and torchtitan wants more than it uses, so its imports are listed:

    pip install -e '.[peers]'
    pip install --no-deps torchtitan==0.3.0 spmd-types==0.2.3 tyro docstring-parser triton

What is measured, and what not to conclude from it: docs/layer_benchmark.md.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from sidestream.commands import shared
from sidestream.config.place import CONF
from sidestream.measure import instrument
from sidestream.measure.ranks import Failed, run_ranks
from sidestream.measure.report import add_statistics, draw, print_tables
from sidestream.measure.shapes import SHAPES, listed, parse_case

PEER_PACKAGES = ("transformers", "megatron-core", "torchtitan")
PEER_PROJECTS = ("transformers/", "torchtitan/", "megatron/")
ROUTINGS = {"uniform": 0.0, "zipf": 1.0}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = shared.parser(__doc__, whole=True, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--shapes",
        nargs="+",
        default=list(SHAPES),
        metavar="SHAPE[@RANKS]",
        help=f"names or T,D,F,E,K with T tokens per rank; one rank unless @2 is added ({listed()})",
    )
    add(
        "--peers",
        nargs="+",
        default=["all"],
        help="all, none, or any of transformers, torchtitan, megatron_alltoall, megatron_allgather",
    )
    add(
        "--arms",
        nargs="+",
        default=[],
        metavar="sidestream/DISPATCHER+FUSION[,OVERRIDE...]",
        help="default: local+grouped, alltoall+grouped; gemm: the experts' products alone; overrides as for train.py",
    )
    add("--dtype", choices=("bf16", "fp32"), default="bf16")
    add("--rounds", type=int, default=12, help="rounds with fresh tokens and routing each (default 12)")
    add("--warmup", type=int, default=2, help="rounds before them that do not count (default 2)")
    add("--frozen-rounds", type=int, default=0, help="then rounds with the same tokens each (default 0)")
    add_routing(parser)
    add("--seed", type=shared.number(0, 2**63 - 1), default=1234)
    add(
        "--against",
        nargs="+",
        default=[],
        metavar="ARM",
        help="arms, as the table names them, to which ratios are given beside those to dense and the fastest peer",
    )
    add(
        "--malloc",
        choices=("keep", "default"),
        default="keep",
        help="keep: freed memory stays in the process, as in training runs; the same for all arms",
    )
    add(
        "--out",
        type=Path,
        default=Path("logs/bench_layer.json"),
        help="JSON; the picture lies beside it as .png",
    )
    return checked(parser, parser.parse_args(argv))


def add_routing(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--routing",
        choices=tuple(ROUTINGS),
        help="uniform: --skew 0; zipf: --skew 1 with the popular experts on rank 0; peers route from the same gate",
    )
    add(
        "--skew",
        type=shared.number(0, 100, float),
        default=0.0,
        help="s of Zipf(s) expert popularity (default 0: uniform)",
    )
    add(
        "--skew-order",
        choices=("contiguous", "shuffled"),
        default="contiguous",
        help="popular experts on rank 0",
    )


def checked(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> argparse.Namespace:
    """Ends the program where options do not go together; fills in what follows from others."""
    if parsed.rounds < 1 or parsed.warmup < 0 or parsed.frozen_rounds < 0:
        parser.error("--rounds must be at least 1, --warmup and --frozen-rounds at least 0")
    if parsed.routing is not None:
        if parsed.skew or parsed.skew_order != "contiguous":
            parser.error("--routing: sets --skew and --skew-order; give either")
        parsed.skew = ROUTINGS[parsed.routing]
    for name in parsed.against:
        if name not in (*parsed.arms, "dense") and not name.startswith(("sidestream/", *PEER_PROJECTS)):
            parser.error(
                f"--against {name}: expected dense, one of --arms, or a peer's arm, such as megatron/allgather"
            )
    return parsed


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    shared.check_place(options.out)
    command = shared.command_line("scripts/bench_layer.py", argv)
    head = instrument.begin("layer", command=command, packages=PEER_PACKAGES)
    try:
        cases = [parse_case(text) for text in options.shapes]
        peers, left_out = choose_peers(options)
        print(f"peers: {', '.join(peers) or 'none'}", flush=True)
        groups = []
        for world_size in sorted({case.world_size for case in cases}):
            shapes = [asdict(case.shape) for case in cases if case.world_size == world_size]
            groups.append(run_ranks(job(options, shapes, peers), world_size=world_size))
    except (ValueError, Failed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    emulated = ["all ranks on one machine, gloo over the loopback"]
    if options.peers != ["none"]:
        emulated.append(
            "megatron-core runs on a CPU with its torch.cuda calls replaced by ones that do nothing"
        )
    asked = ("malloc", "seed", "skew", "skew_order", "against", "rounds", "frozen_rounds")
    result = instrument.end(
        head,
        device="cpu",
        threads_per_rank=1,
        transport="torch",
        link="native",
        emulated=emulated,
        precision=options.dtype,
        warmup_rounds=options.warmup,
        **{name: getattr(options, name) for name in asked},
        pinned=all(group["pinned"] for group in groups),
        memory_kept=all(group["memory_kept"] for group in groups),
        peers=peers,
        peers_left_out=left_out,
        results=[record for group in groups for record in group["records"]],
    )
    for record in result["results"]:
        add_statistics(record, against=options.against)
    instrument.write(result, options.out, print_tables, draw)
    return 0


def choose_peers(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    if options.peers == ["none"]:
        return [], {}
    from sidestream.measure import peers  # brings torch
    from sidestream.measure.layer import DTYPES

    return peers.choose(options.peers, DTYPES[options.dtype])


def job(options: argparse.Namespace, shapes: list[dict[str, Any]], peers: list[str]) -> dict[str, Any]:
    """`layer.Job` in plain types, and `malloc`."""
    return {
        "shapes": shapes,
        "arms": options.arms,
        "peers": peers,
        "dtype": options.dtype,
        "rounds": options.rounds,
        "warmup": options.warmup,
        "frozen_rounds": options.frozen_rounds,
        "skew": options.skew,
        "skew_order": options.skew_order,
        "seed": options.seed,
        "conf": str(CONF),
        "malloc": options.malloc,
    }


def run() -> NoReturn:
    shared.run(main)
