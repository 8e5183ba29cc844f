"""What a schedule costs where there is nothing to hide: one rank, native link, overlapped against its own serial run.

python scripts/overlap_cost.py [--rounds 30] [--out docs/results/overlap_cost.json] [OVERRIDES...]

Forward and backward of one MoE unit, the two arms in turn, order alternating; the figure is the median over rounds of
overlapped / serial.
"""

import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from sidestream import build
from sidestream.commands import shared
from sidestream.config.place import CONF
from sidestream.config.schema import register
from sidestream.data.batch import Batch
from sidestream.launch.allocator import keep_freed_memory
from sidestream.launch.worker import RankEnv
from sidestream.measure import instrument
from sidestream.parallel.mesh import build_parallel
from sidestream.parallel.world import join_world, leave_world
from sidestream.profiling.rounds import time_rounds
from sidestream.profiling.work import UnitWork, unit_input
from sidestream.report.statistics import summarize
from sidestream.report.table import Cell, Table, numbers, say

SCHEDULES = {
    "shared_expert": ["overlap=shared_expert"],
    "chunked": ["overlap=chunked"],
    "two_batch": ["overlap=two_batch"],
    "shortcut": ["overlap=shortcut", "overlap.slot=1"],
    "delay_wgrad": ["overlap=shared_expert", "overlap.delay_wgrad=true"],
}
ARMS = ("serial", "overlapped")
VOCAB_SIZE = 256


def unit_of(cfg: DictConfig) -> UnitWork:
    """The first MoE unit of a model on this one rank."""
    device = torch.device("cpu")
    parallel = build_parallel(expert_parallel_size=1, device_type="cpu", timeout=timedelta(seconds=60))
    sequences = cfg.data.global_batch_size
    model = build.model_builder(cfg, vocab_size=VOCAB_SIZE, device=device, num_sequences=sequences)(parallel)
    model.eval()
    generator = torch.Generator().manual_seed(cfg.seed)
    tokens = torch.randint(0, VOCAB_SIZE, (sequences, cfg.data.seq_length + 1), generator=generator)
    unit, h, context = unit_input(model, Batch.of(tokens))
    return UnitWork(model, unit, h, context)


def rounds_of(work: UnitWork, *, rounds: int, warmup: int) -> dict[str, list[float]]:
    """Milliseconds of forward and backward per round, by arm."""

    def measure(number: int, _: int) -> tuple[float, ...]:
        work.model.schedule.enabled = ARMS[number] == "overlapped"
        begin = time.perf_counter()
        for name in work.passes:
            work.run(name)
        return (time.perf_counter() - begin,)

    seconds = time_rounds(len(ARMS), measure, parts=1, rounds=rounds, warmup=warmup, seed=1)
    return {arm: (1e3 * seconds[:, number, 0]).tolist() for number, arm in enumerate(ARMS)}


def show(result: dict[str, Any], console: Console) -> None:
    """A row per schedule."""
    table = Table(["schedule", *numbers("serial, ms", "overlapped, ms", "overlapped / serial")])
    for name, found in result["schedules"].items():
        ratio = Cell(f"{found['ratio']:.3f}", detail=f"{found['ratio_q1']:.3f} to {found['ratio_q3']:.3f}")
        table.add(name, f"{found['serial_ms']:.2f}", f"{found['overlapped_ms']:.2f}", ratio)
    table.show(console)
    say(f"Medians of {result['rounds']} rounds, and quartiles. {instrument.load(result)}", console)


def main(argv: list[str] | None = None) -> int:
    parser = shared.parser(__doc__)
    parser.add_argument("--rounds", type=shared.number(1), default=30)
    parser.add_argument("--warmup", type=shared.number(0), default=3)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the figures to this file too")
    parser.add_argument("overrides", nargs="*", help="of train.py, such as model.hidden_size=256")
    arguments = parser.parse_args(argv)
    shared.check_place(arguments.out)
    keep_freed_memory()
    torch.set_num_threads(1)
    register()
    command = shared.command_line("scripts/overlap_cost.py", argv)
    head = instrument.begin("overlap_cost", command=command)
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        env = RankEnv(0, 0, 1, 1, f"file://{scratch}/store")
        join_world(env, torch.device("cpu"), timeout=timedelta(seconds=60))
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF.absolute())):
            for name, overrides in SCHEDULES.items():
                cfg = compose(
                    "train", [*overrides, "dispatcher=nccl_ep", "trainer.devices=1", *arguments.overrides]
                )
                OmegaConf.resolve(cfg)
                times = rounds_of(unit_of(cfg), rounds=arguments.rounds, warmup=arguments.warmup)
                ratio = summarize([b / a for a, b in zip(times["serial"], times["overlapped"])])
                found[name] = {
                    "serial_ms": statistics.median(times["serial"]),
                    "overlapped_ms": statistics.median(times["overlapped"]),
                    "ratio": ratio["median"],
                    "ratio_q1": ratio["q1"],
                    "ratio_q3": ratio["q3"],
                    "rounds_ms": times,
                }
        leave_world()
    result = instrument.end(
        head, rounds=arguments.rounds, warmup_rounds=arguments.warmup, threads=1, schedules=found
    )
    instrument.write(result, arguments.out, show)
    return 0


def run() -> NoReturn:
    shared.run(main)
