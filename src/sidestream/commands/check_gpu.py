"""Tries out what Sidestream needs of this machine, most of all of its GPUs, and prints one row per check.

python scripts/check_gpu.py [--json checks.json] [--list]

A check is a function in `CHECKS`: it returns what it found, raises `Skip` with the reason why it cannot run here, and
anything else it raises is the failure. Without a GPU it takes a few seconds and says what it skipped.
"""

import math
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from sidestream.build import model_shape
from sidestream.commands import shared
from sidestream.config.devices import count_gpus
from sidestream.config.place import CONF
from sidestream.config.schema import register
from sidestream.dispatch.base import Received
from sidestream.exchange.ops import Channel
from sidestream.exchange.transfer import Transfer
from sidestream.fusion.base import Fusion
from sidestream.fusion.grouped import GroupedExperts
from sidestream.fusion.loop import LoopExperts
from sidestream.graph.check import LintFinished, StepLint
from sidestream.launch.worker import RankEnv
from sidestream.measure.graph_bench import VOCAB_SIZE, Job, Trained, composed, measure
from sidestream.model.account import account
from sidestream.parallel.reduction import local
from sidestream.parallel.world import join_world, leave_world
from sidestream.run import LINT_STEPS
from sidestream.tracking.folder import RunFolder, package_versions, write_json_atomic
from sidestream.tracking.machine import peak as device_peak

TRAIN = (sys.executable, "-P", "-m", "sidestream", "train")
TOLD = "told"  # file in which a process of its own leaves its finding
SECONDS = 120  # of anything that starts processes
COLORS = {"ok": "green", "failed": "bold red", "skipped": "yellow"}
MICRO = (
    "model.hidden_size=64",
    "model.ffn_hidden_size=64",
    "model.expert_hidden_size=64",
    "data.seq_length=64",
    "scheduler.warmup_steps=2",
    "trainer.max_steps=3",
    "trainer.log_every_n_steps=1",
    "trainer.limit_val_batches=2",
)
STATIC = ["dispatcher=nccl_ep", "dispatcher.capacity_factor=8.0", *MICRO[:4]]  # nothing overflows
MEDIUM = [  # the last of two values counts
    "model.hidden_size=1024",
    "model.ffn_hidden_size=2816",
    "model.expert_hidden_size=1024",
    "data.seq_length=1024",
    "trainer.precision=bf16-mixed",
    "dispatcher.capacity_factor=2.0",
]
SCHEDULES = {
    "none": [],
    "shared_expert": ["overlap=shared_expert"],
    "chunked": ["overlap=chunked"],
    "two_batch": ["overlap=two_batch"],
    "shortcut": ["overlap=shortcut", "overlap.slot=1"],
}
ROWS = [[3, 5], [0, 2]]  # ROWS[a][b]: rows from rank a to rank b; uneven, and one transfer is empty


class Skip(Exception):
    """The check cannot run on this machine; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """One row of the table."""

    name: str
    state: Literal["ok", "failed", "skipped"]
    detail: str
    seconds: float


def need_gpus(count: int) -> None:
    """Skips a check that needs more GPUs than there are."""
    found = torch.cuda.device_count()
    if found < count:
        raise Skip(f"needs {count} CUDA device{'s' if count > 1 else ''}, torch sees {found}")


def torch_build() -> str:
    """The build of torch fits the machine."""
    if torch.version.cuda is None:
        installed = count_gpus()
        if installed:
            raise RuntimeError(f"{installed} GPUs here, but torch {torch.__version__} is a CPU build")
        return f"torch {torch.__version__}, CPU build"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[arg-type]
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}, {' '.join(torch.cuda.get_arch_list())}"


def devices() -> str:
    """Every GPU computes, and train.py, which does not ask torch, counts as many as torch does."""
    need_gpus(1)
    found = torch.cuda.device_count()
    if count_gpus() != found:
        raise RuntimeError(f"torch sees {found} GPUs, train.py counts {count_gpus()}")
    names = []
    for index in range(found):
        assert (torch.ones(4, device=f"cuda:{index}") * 2).sum().item() == 8
        device = torch.cuda.get_device_properties(index)
        names.append(f"{device.name}, sm_{device.major}{device.minor}, {device.total_memory / 2**30:.0f} GiB")
    return "; ".join(names)


def bf16() -> str:
    """A bf16 product is as exact as bf16 is."""
    device = compute_device()
    a, b = (torch.randn(256, 256, device=device, generator=generator(device, seed)) for seed in (1, 2))
    error = difference(a.bfloat16() @ b.bfloat16(), a @ b)
    if not error <= 0.02:
        raise RuntimeError(f"relative error {error:.1e} on {device.type}; expected below 2e-2")
    return f"relative error {error:.1e} on {device.type}"


def grouped_gemm() -> str:
    """`fusion=grouped` computes what `fusion=loop` does, forward and backward, and without reading on the host."""
    device = compute_device()
    found = []
    for dtype, limit in ((torch.bfloat16, 0.05), (torch.float32, 1e-4)):
        wanted, _ = expert_results(LoopExperts(), device, dtype)
        results, reads = expert_results(GroupedExperts(), device, dtype)
        error = max(difference(result, other) for result, other in zip(results, wanted))
        name = str(dtype).removeprefix("torch.")
        if not error <= limit:  # NaN too
            raise RuntimeError(
                f"{name} on {device.type}: {error:.1e} from the loop; expected below {limit:.0e}"
            )
        host = "" if device.type == "cpu" else f", {reads} host reads" if reads else ", no host read"
        found.append(f"{name} {error:.1e}{host}")
    return f"difference to the loop on {device.type}: {'; '.join(found)}"


def expert_results(fusion: Fusion, device: torch.device, dtype: torch.dtype) -> tuple[list[Tensor], int]:
    """Runs 4 experts on 96 rows; the second has none, the last 16 rows belong to nobody and are NaN.

    Returns:
        Output and gradients of the experts' rows, their weights and both weight stacks; how often the host waited
        for the GPU.
    """
    draw = generator(device, 3)
    shapes = [(96, 64), (96,), (4, 64, 128), (4, 64, 64)]
    tensors = [torch.randn(shape, device=device, generator=draw) for shape in shapes]
    tensors[0][80:], tensors[1][80:] = math.nan, math.nan
    rows, gate_up, down = (tensors[i].to(dtype).requires_grad_() for i in (0, 2, 3))
    weights = tensors[1].requires_grad_()
    offsets = torch.tensor([16, 16, 48, 80], dtype=torch.int32, device=device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            out = fusion(Received(rows, weights, offsets), gate_up, down)
            out.backward(torch.ones_like(out))
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    reads = sum("synchronizing" in str(warning.message) for warning in caught)
    assert all(leaf.grad is not None for leaf in (rows, weights, gate_up, down))
    # What comes out of rows that belong to nobody is undefined.
    of_rows = [tensor[: int(offsets[-1])] for tensor in (out.detach(), rows.grad, weights.grad)]  # type: ignore[index]
    return [*of_rows, gate_up.grad, down.grad], reads  # type: ignore[list-item]


def nccl_exchange() -> str:
    """Two ranks exchange rows and gradients over NCCL through the operators that every dispatcher uses."""
    need_gpus(2)
    with tempfile.TemporaryDirectory() as scratch:
        spawn(_nccl_rank, f"file://{scratch}/store", ranks=2)
    return "uneven all-to-all between 2 ranks, forward and backward"


def spawn(function: Callable[..., None], *args: object, ranks: int) -> None:
    """Runs `function(rank, *args)` in a process per rank; none outlives the time limit.

    Raises:
        TimeoutError: they did not finish.
        Exception: what the first failing rank raised.
    """
    context = mp.spawn(function, args=args, nprocs=ranks, join=False)
    assert context is not None
    deadline = time.monotonic() + SECONDS
    try:
        while not context.join(timeout=1):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer in {SECONDS} s")
    finally:
        for process in context.processes:
            process.kill()


def _nccl_rank(rank: int, store: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    join_world(RankEnv(rank, rank, 2, 2, store), device, timeout=timedelta(seconds=SECONDS))
    exchange(rank, device)
    leave_world()


def exchange(rank: int, device: torch.device) -> None:
    """Sends `ROWS` between the two ranks of the world and compares what arrives, and the gradients."""
    parts = [
        torch.arange(4.0 * sum(counts), device=device).view(-1, 4) + 100 * source
        for source, counts in enumerate(ROWS)
    ]
    received = [counts[rank] for counts in ROWS]
    channel = Channel(dist.group.WORLD)
    x = parts[rank].clone().requires_grad_()
    transfer = Transfer(channel, torch.tensor(ROWS[rank]), torch.tensor(received), "check")
    rows = transfer.finish(transfer.start(x, num_received=sum(received)))
    (rows * 2).sum().backward()
    wanted = torch.cat([part.split(counts)[rank] for part, counts in zip(parts, ROWS)])
    assert torch.equal(rows.detach(), wanted), "other rows arrived than were sent"
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 2)), "other gradients came back"
    channel.close()


def training() -> str:
    """Three steps of train.py on the GPUs have the losses that one CPU rank has."""
    need_gpus(1)
    count = min(2, torch.cuda.device_count())
    on_gpu = ("trainer.accelerator=gpu", f"trainer.devices={count}")
    wanted = micro_run("trainer.accelerator=cpu", "trainer.devices=1")
    found = []
    for precision, limit in (("32-true", 1e-2), ("bf16-mixed", 0.1)):
        losses = micro_run(*on_gpu, f"trainer.precision={precision}")
        error = max(abs(loss - other) for loss, other in zip(losses, wanted))
        if not error < limit:
            raise RuntimeError(f"{precision}: losses {losses}, on a CPU {wanted}; expected within {limit}")
        found.append(f"{precision} {error:.1e}")
    return f"3 steps on {count} GPU{'s' if count > 1 else ''}, losses off from a CPU's: {', '.join(found)}"


def step_graphs() -> str:
    """With each schedule, a step graph trains exactly as without one."""
    return on_one_gpu(graphs_agree)


def fused() -> str:
    """With each schedule, fusion=mega trains like grouped experts, and exactly so with a step graph."""
    return on_one_gpu(fused_agrees)


def step_lint() -> str:
    """Nothing in a static step makes the host wait or depends on its values."""
    return on_one_gpu(lint_is_clean)


def graph_speed() -> str:
    """Steps with and without a graph: tokens/s, MFU, time in which the GPU idles, peak memory."""
    return on_one_gpu(speed_with_a_graph)


def on_one_gpu(function: Callable[[torch.device], str]) -> str:
    """Runs a function in a process of its own, the only rank of an NCCL process group."""
    need_gpus(1)
    with tempfile.TemporaryDirectory() as scratch:
        spawn(_one_rank, function, scratch, ranks=1)
        return (Path(scratch) / TOLD).read_text(encoding="utf-8")


def _one_rank(rank: int, function: Callable[[torch.device], str], scratch: str) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    env = RankEnv(0, 0, 1, 1, f"file://{scratch}/store")
    join_world(env, device, timeout=timedelta(seconds=SECONDS))
    register()
    (Path(scratch) / TOLD).write_text(function(device), encoding="utf-8")
    leave_world()


def graphs_agree(device: torch.device) -> str:
    """Trains four steps three times: as written, again, and with a graph. Needs a process group and the schemas."""
    precision = "bf16-mixed" if device.type == "cuda" else "32-true"
    for name, overlap in SCHEDULES.items():
        cfg = composed(str(CONF), [*STATIC, *overlap, f"trainer.precision={precision}"])
        first, again, graph = (trained(cfg, device, kind) for kind in ("eager", "eager", "graph"))
        if first != again:
            raise RuntimeError(f"overlap={name}: two runs without a graph differ: {first}, {again}")
        if graph != first:
            raise RuntimeError(f"overlap={name}: with a graph {graph}, without {first}")
    return f"4 steps equal bit for bit on {device.type} in {precision}: {', '.join(SCHEDULES)}"


def fused_agrees(device: torch.device) -> str:
    """Trains four steps of grouped experts, of the fused operation, and of that in a graph."""
    precision, limit = ("bf16-mixed", 2e-2) if device.type == "cuda" else ("32-true", 1e-4)
    mega = ["fusion=mega", *(["fusion.capacity_factor=8.0"] if device.type == "cuda" else []), *MICRO[:4]]
    worst, names = 0.0, [name for name in SCHEDULES if name != "chunked"]  # which it is refused with
    for name in names:
        options = [*SCHEDULES[name], f"trainer.precision={precision}"]
        grouped = trained(composed(str(CONF), [*STATIC, *options]), device, "eager")
        first, graph = (
            trained(composed(str(CONF), [*mega, *options]), device, kind) for kind in ("eager", "graph")
        )
        if graph != first:
            raise RuntimeError(f"fusion=mega overlap={name}: with a graph {graph}, without {first}")
        error = max(abs(one - other) for one, other in zip(first[:4], grouped[:4]))
        if not error < limit:
            raise RuntimeError(f"fusion=mega overlap={name}: losses {first[:4]}, grouped {grouped[:4]}")
        worst = max(worst, error)
    return (
        f"losses within {worst:.1e} of grouped experts', with a graph equal bit for bit: {', '.join(names)}"
    )


def trained(cfg: Any, device: torch.device, kind: str) -> list[float]:
    """Losses of four steps, and the sums of all parameters behind them."""
    torch.manual_seed(5)
    run = Trained(cfg, device)
    losses = [run.train(kind) for _ in range(4)]
    sums = [float(local(p).detach().double().sum()) for p in run.step.params]
    run.close()
    return [*losses, *sums]


def lint_is_clean(device: torch.device) -> str:
    """The recorder of `graph.lint` on a static step."""
    cfg = composed(
        str(CONF), [*STATIC, f"trainer.precision={'bf16-mixed' if device.type == 'cuda' else '32-true'}"]
    )
    run, lint = Trained(cfg, device), StepLint()
    try:
        for _ in range(LINT_STEPS):
            batch = lint.bind(run.batch())
            run.step.prepare(batch)
            lint.run(lambda b=batch: run.step.run(b), ready=True, agree=lambda found: [found])  # type: ignore[misc]
    except LintFinished as done:
        if done.lines:
            raise RuntimeError(str(done)) from None
    finally:
        run.close()
    return "a static step reads nothing on the host and allocates nothing that moves"


def speed_with_a_graph(device: torch.device) -> str:
    """Measured as by scripts/bench_graph.py, on a model that fits any GPU."""
    job = Job(conf=str(CONF), cases=[], rounds=10, warmup=3)
    found = measure([*STATIC, *MEDIUM], job, device, say=lambda _: None)
    cfg, speed = composed(str(CONF), [*STATIC, *MEDIUM]), found["tokens_per_second"]
    shape = model_shape(cfg, vocab_size=VOCAB_SIZE)
    flops = account(shape, top_k=cfg.router.top_k, seq_length=cfg.data.seq_length, extra_per_unit=0)
    peak = device_peak("auto", device=device, dtype=torch.bfloat16).flops
    parts = []
    for kind in ("eager", "graph"):
        mfu = speed[kind] * flops.flops_per_token / peak if peak else None
        idle = idle_share(cfg, device, kind)
        memory = found["peak_memory_bytes"][kind]
        parts.append(
            f"{kind} {speed[kind]:.0f} tokens/s, MFU {'unknown' if mfu is None else f'{mfu:.1%}'}, "
            f"GPU idle {'unknown' if idle is None else f'{idle:.0%}'}, {(memory or 0) / 2**20:.0f} MiB"
        )
    return f"{'; '.join(parts)}; {found['speedup']['median']:.2f} x; capture {found['capture_seconds']:.2f} s"


def idle_share(cfg: Any, device: torch.device, kind: str) -> float | None:
    """Share of a step's time in which no kernel runs: what launches cost. None without a GPU."""
    if device.type != "cuda":
        return None
    run = Trained(cfg, device)
    for _ in range(4):
        run.train(kind)
    torch.cuda.synchronize(device)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        begin = time.perf_counter()
        run.train(kind)
        torch.cuda.synchronize(device)
        elapsed = time.perf_counter() - begin
    run.close()
    busy = sum(event.self_device_time_total for event in profile.key_averages()) * 1e-6
    return max(0.0, 1 - busy / elapsed)


def micro_run(*overrides: str) -> list[float]:
    """Trains a micro model for 3 steps with train.py; returns the training losses.

    Raises:
        RuntimeError: it did not finish; the message is the last line of what it printed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        place = f"hydra.run.dir='{scratch}/run'"
        done = subprocess.run(
            [*TRAIN, *MICRO, *overrides, place],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=scratch,
        )
        if done.returncode:
            raise RuntimeError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])
        records = RunFolder(Path(scratch) / "run").read_metrics()
    losses = [record["train/loss"] for record in records if "train/loss" in record]
    assert len(losses) == 3 and all(map(math.isfinite, losses)), losses
    return losses


def compute_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def difference(value: Tensor, wanted: Tensor) -> float:
    """Returns the largest difference, relative to the largest value."""
    value, wanted = value.float(), wanted.float()
    return float((value - wanted).abs().max() / wanted.abs().max())


CHECKS: list[Callable[[], str]] = [
    torch_build,
    devices,
    bf16,
    grouped_gemm,
    nccl_exchange,
    training,
    step_graphs,
    fused,
    step_lint,
    graph_speed,
]


def run_checks(checks: Sequence[Callable[[], str]]) -> list[Outcome]:
    """Runs every check, whatever the ones before it found."""
    outcomes = []
    for check in checks:
        started = time.monotonic()
        try:
            state, detail = "ok", check()
        except Skip as reason:
            state, detail = "skipped", str(reason)
        except Exception as error:  # whatever it is, it is this row's finding
            # The last line: errors of a spawned rank begin with its traceback.
            text = str(error).strip() or "no message"
            state, detail = "failed", f"{type(error).__name__}: {text.splitlines()[-1]}"
        name = check.__name__.replace("_", " ")
        outcomes.append(Outcome(name, state, detail, time.monotonic() - started))  # type: ignore[arg-type]
    return outcomes


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    table = Table("check", "result", "found", "s")
    for row in outcomes:
        state = Text(row.state, style=COLORS[row.state])
        table.add_row(row.name, state, Text(row.detail, overflow="fold"), f"{row.seconds:.1f}")
    console.print(table)


def main(argv: list[str] | None = None, *, checks: Sequence[Callable[[], str]] = CHECKS) -> int:
    parser = shared.parser(__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file too")
    parser.add_argument("--list", action="store_true", help="say what would be checked, and check nothing")
    arguments = parser.parse_args(argv)
    if arguments.list:
        for check in checks:
            print(f"{check.__name__.replace('_', ' '):14s} {(check.__doc__ or '').splitlines()[0]}")
        return 0
    shared.check_place(arguments.json)
    outcomes = run_checks(checks)
    show(outcomes, Console())
    if arguments.json is not None:
        rows = {"checks": [asdict(row) for row in outcomes], "versions": package_versions()}
        write_json_atomic(arguments.json, rows)
    return int(any(row.state == "failed" for row in outcomes))


def run() -> NoReturn:
    shared.run(main)
