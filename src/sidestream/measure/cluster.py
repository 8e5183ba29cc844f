"""What a cluster must show before its dispatchers are used: every one moves the right rows, then how fast.

Each dispatcher of conf/ is checked with each transport, with exact sizes, with a fixed buffer and with one that is too
small, on a small ragged case with missing routes and on a real shape, against a computation without an exchange (see
`dispatch_conformance.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

from sidestream.config.availability import Machine, verdict
from sidestream.config.capabilities import capabilities
from sidestream.dispatch.none import NoDispatcher
from sidestream.measure import dispatch
from sidestream.measure.dispatch_arms import DispatcherArm, Given
from sidestream.measure.dispatch_conformance import check_arm, make_scales
from sidestream.measure.dispatch_routing import Draw, draw_routing
from sidestream.measure.layer import DTYPES
from sidestream.measure.shapes import LayerShape, parse_case
from sidestream.tracking.folder import write_json_atomic

SIZES = {"small": ("uniform", "one_rank"), "real": ("uniform", "zipf")}  # with their routings
REAL = {"cpu": "1024,512,256,64,8", "cuda": "4096,7168,2048,256,8"}
# Library first: with `transport=auto` it is what a user gets.
TRANSPORTS = ("library", "torch")
_HOLE_EVERY = 5  # of the small case's routes, one is missing


@dataclass(frozen=True)
class Check:
    """One row of the table.

    Attributes:
        transport: `library`, `torch`, or `none` where nothing moves.
        mode: `exact` sizes, `static`: a fixed buffer, `overflow`: one for half of the mean load, which must lose the
            routes that all dispatchers agree to lose; `all` where nothing runs.
        size: `small`, `real`; `all`.
        arm: As in the dispatch benchmark.
        why: Why it cannot run here; empty if it can.
    """

    dispatcher: str
    transport: str
    mode: str
    size: str
    arm: str
    why: str = ""

    @property
    def name(self) -> str:
        return f"{self.dispatcher}, {self.transport}, {self.mode}, {self.size}"


def small_shape(ranks: int) -> LayerShape:
    """Ragged and quick, within what the libraries take: rows of 512 bytes in bf16, 4 experts on each rank."""
    return parse_case(f"64,256,128,{4 * ranks},4@{ranks}").shape


def plan_checks(conf: Path, *, machine: Machine, ranks: int, only: Sequence[str] = ()) -> list[Check]:
    """What would be checked on a machine with so many ranks that share the experts; what cannot run says why.

    Args:
        conf: Folder of the Hydra configuration.
        only: Names of dispatchers; empty: all.

    Raises:
        ValueError: A name is no dispatcher.
    """
    paths = {path.stem: path for path in sorted((conf / "dispatcher").glob("*.yaml"))}
    del paths[NoDispatcher.name]  # moves nothing
    for name in only:
        if name not in paths:
            raise ValueError(f"only={name}: expected any of {', '.join(paths)}")
    found = []
    for name in only or paths:
        node = OmegaConf.load(paths[name])
        assert isinstance(node, DictConfig)
        found += _of_dispatcher(name, node, machine=machine, ranks=ranks)
    return found


def _of_dispatcher(name: str, node: DictConfig, *, machine: Machine, ranks: int) -> list[Check]:
    can, found = capabilities(node), []
    if can.max_expert_parallel_size is not None and ranks > can.max_expert_parallel_size:
        why = f"all experts on {can.max_expert_parallel_size} rank, here are {ranks}"
        return [Check(name, "none", "all", "all", name, why)]
    for transport in TRANSPORTS if "transport" in node else ("torch",):
        arm = f"{name},dispatcher.transport={transport}" if "transport" in node else name
        option = (can.library or name) if transport == "library" else name
        says = verdict("dispatcher", option, machine=machine, transport=transport, ranks=ranks)
        if not says.ok:
            found.append(Check(name, transport, "all", "all", arm, f"{says.why}; {says.fix}"))
            continue
        for size in SIZES:
            # Room for every route of the world takes too much memory with a real shape.
            room = float(ranks) if size == "small" else 2.0
            modes = {"exact": arm}
            if can.static:
                modes["static"] = f"{arm},dispatcher.capacity_factor={room}"
                modes["overflow"] = f"{arm},dispatcher.capacity_factor=0.5"
            found += [Check(name, transport, mode, size, each) for mode, each in modes.items()]
    return found


@dataclass(frozen=True)
class Job:
    """What one group of ranks has to do.

    Attributes:
        checks: In this order.
        real: Of the real shape.
        dtype: `bf16` or `fp32`.
        rounds, warmup: Of the benchmark; no rounds: none.
        conf: Folder of the Hydra configuration.
        progress: File that rank 0 writes after every check: a library that crashes leaves what was found before it.
    """

    checks: list[Check]
    real: LayerShape
    dtype: str
    rounds: int
    warmup: int
    seed: int
    conf: str
    progress: str

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Job:
        return cls(
            **{
                **plain,
                "checks": [Check(**check) for check in plain["checks"]],
                "real": LayerShape(**plain["real"]),
            }
        )


def run_plain(
    plain: dict[str, Any], *, say: Callable[[str], None], device: torch.device = dispatch.DEVICES["cpu"]
) -> list[dict[str, Any]]:
    """Run all checks, then the benchmark of the arms that passed. Collective.

    Returns:
        One record: `checks`, rows of the table, and `benchmark`, records of `measure.dispatch`.
    """
    job, rows = Job.from_json(plain), []
    for check in job.checks:
        started = time.monotonic()
        state, detail = _run_check(job, check, device)
        seconds = round(time.monotonic() - started, 2)
        rows.append({**asdict(check), "state": state, "detail": detail, "seconds": seconds})
        if state != "skipped":
            say(f"{check.name}: {state}, {detail}")
        if dist.get_rank() == 0:
            write_json_atomic(job.progress, {"status": "running", "checks": rows})
    arms = arms_to_time(rows) if job.rounds else []
    return [
        {
            "checks": rows,
            "benchmark": dispatch.run_job(_benchmark(job, arms), say=say, device=device) if arms else [],
        }
    ]


def _run_check(job: Job, check: Check, device: torch.device) -> tuple[str, str]:
    """State and what was found. A rank that fails alone leaves the others waiting until their time is up."""
    if check.why:
        return "skipped", check.why
    try:
        return "ok", conformance(job, check, device)
    except Exception as error:  # whatever it is, it is this row's finding
        text = str(error).strip() or "no message"
        return "failed", f"{type(error).__name__}: {text.splitlines()[-1]}"


def conformance(job: Job, check: Check, device: torch.device) -> str:
    """One check with each routing of its size. Collective.

    Raises:
        ValueError: Output or gradients are wrong, or other routes were lost than should be.
    """
    shape = small_shape(dist.get_world_size()) if check.size == "small" else job.real
    dtype = DTYPES[job.dtype]
    arm = DispatcherArm(check.arm, shape, conf=Path(job.conf), dtype=dtype, device=device)
    try:
        if check.transport == "library" and arm.transport in (None, "torch"):
            raise ValueError(f"{check.arm}: ran on transport {arm.transport}, not on the library")
        scales = make_scales(shape, device, seed=job.seed)
        x, gradient = dispatch.make_rows(shape, dtype=dtype, device=device, seed=job.seed)
        worst, lost = 0.0, 0
        for kind in SIZES[check.size]:
            draw = _draw(job, shape, kind, ragged=check.size == "small")
            tokens = len(draw.ids)
            given = Given.of(draw, x[:tokens], gradient[:tokens])
            found, errors = check_arm(arm, given, scales, precision=job.dtype)
            worst, lost = max(worst, *errors.values()), lost + found.dropped
        if check.mode == "overflow" and not lost:
            raise ValueError(f"{check.arm}: no route was lost in a buffer that is too small")
    finally:
        arm.close()
    losses = f", {lost} routes lost as agreed" if lost else ""
    return f"largest error {worst:.1e} in {job.dtype}{losses}"


def _draw(job: Job, shape: LayerShape, kind: str, *, ragged: bool) -> Draw:
    """The routing of a check; ragged: fewer tokens on later ranks, routes missing, one token without any."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tokens = max(1, shape.tokens - 3 * rank) if ragged else shape.tokens
    place = {"rank": rank, "world_size": world_size}
    draw = draw_routing(kind, shape, seed=job.seed, draw=0, tokens=tokens, **place)
    if not ragged:
        return draw
    hole = (torch.arange(draw.ids.numel()) % _HOLE_EVERY == rank % _HOLE_EVERY).view_as(draw.ids)
    hole[0] = True
    return Draw(draw.ids.masked_fill(hole, -1), draw.weights, complete=False)


def arms_to_time(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Exact arms of the dispatchers whose rows all passed, of the library where there is one; the first also static.

    Libraries come first, then what stands in for them: ratios are to the first.
    """
    arms: dict[str, str] = {}
    for row in sorted(rows, key=lambda row: (row["transport"] != "library", "transport=" not in row["arm"])):
        same = [r for r in rows if (r["dispatcher"], r["transport"]) == (row["dispatcher"], row["transport"])]
        if row["mode"] == "exact" and all(r["state"] == "ok" for r in same):
            arms.setdefault(row["dispatcher"], row["arm"])
    chosen = list(arms.values())
    static = [row["dispatcher"] for row in rows if row["mode"] == "static"]
    return (
        chosen
        + [f"{arm},dispatcher.capacity_factor=1.25" for name, arm in arms.items() if name in static][:1]
    )


def _benchmark(job: Job, arms: list[str]) -> dispatch.Job:
    return dispatch.Job(
        shapes=[job.real],
        routings=["uniform", "zipf"],
        arms=arms,
        floors=arms[:1],
        dtype=job.dtype,
        rounds=job.rounds,
        warmup=job.warmup,
        seed=job.seed,
        order_seed=job.seed,
        conf=job.conf,
        strict=False,
    )
