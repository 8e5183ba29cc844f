"""The dispatch benchmark on one rank: wire the arms, check them, time them, count their bytes.

Legend: T tokens of this rank, K routes per token, H features.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.measure.dispatch_arms import (
    FLOORS,
    PARTS,
    BareFloor,
    DispatchArm,
    DispatcherArm,
    ExchangeFloor,
    Given,
)
from sidestream.measure.dispatch_conformance import (
    Outcome,
    check_arm,
    distance,
    judge,
    make_scales,
    precision_of,
)
from sidestream.measure.dispatch_routing import (
    Draw,
    RoutingHash,
    activation_bytes,
    draw_routing,
    necessary,
)
from sidestream.measure.layer import DTYPES
from sidestream.measure.peak_memory import peak_on
from sidestream.measure.problem import describe_ids
from sidestream.measure.shapes import LayerShape
from sidestream.profiling.rounds import time_rounds, timed

CHECKED = -1  # number of the draw that is checked and weighed; not one of the rounds
DEVICES = {"cpu": torch.device("cpu")}


@dataclass(frozen=True)
class Job:
    """What one group of ranks has to measure.

    Attributes:
        shapes: One after another, in one process group.
        routings: Of `dispatch_routing.ROUTINGS`, each for every shape.
        arms: `<dispatcher>[,<override>...]`; all are compared with the first.
        floors: Arms under which the bare transfers are timed too.
        dtype: `bf16` or `fp32`.
        rounds, warmup: Each with a routing of its own, the same for all arms.
        order_seed: Of the order of the arms, which differs from start to start.
        conf: Folder of the Hydra configuration.
        strict: An arm that cannot run ends the benchmark; otherwise it is left out, with the reason.
    """

    shapes: list[LayerShape]
    routings: list[str]
    arms: list[str]
    floors: list[str]
    dtype: str
    rounds: int
    warmup: int
    seed: int
    order_seed: int
    conf: str
    strict: bool = True

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Job:
        return cls(**{**plain, "shapes": [LayerShape(**shape) for shape in plain["shapes"]]})


@dataclass
class Case:
    """One shape with one routing on this rank."""

    job: Job
    shape: LayerShape
    kind: str
    device: torch.device
    arms: list[DispatcherArm]
    floors: list[DispatchArm]
    hash: RoutingHash = field(default_factory=RoutingHash)

    def __post_init__(self) -> None:
        self.x, self.output_gradient = make_rows(
            self.shape, dtype=DTYPES[self.job.dtype], device=self.device, seed=self.job.seed
        )
        self._drawn: tuple[int, Given] | None = None

    def draw(self, number: int) -> Draw:
        return draw_routing(
            self.kind,
            self.shape,
            seed=self.job.seed,
            draw=number,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        )

    def given(self, number: int) -> Given:
        """The round's routing; drawn once for all arms."""
        if self._drawn is None or self._drawn[0] != number:
            draw = self.draw(number)
            self.hash.add(number, draw)
            self._drawn = number, Given.of(draw, self.x, self.output_gradient)
        return self._drawn[1]


def make_rows(
    shape: LayerShape, *, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Tensor, Tensor]:
    """Tokens and gradient of the output of this rank, `[T, H]` each."""
    generator = torch.Generator().manual_seed(seed + 7919 * (dist.get_rank() + 1))
    both = torch.randn(2, shape.tokens, shape.hidden_size, generator=generator)
    x, gradient = both.to(dtype).to(device).unbind(0)
    return x, gradient


def run_plain(
    plain: dict[str, Any], *, say: Callable[[str], None], device: torch.device = DEVICES["cpu"]
) -> list[dict[str, Any]]:
    """`run_job` for a job in plain types."""
    return run_job(Job.from_json(plain), say=say, device=device)


def run_job(
    job: Job, *, say: Callable[[str], None] = print, device: torch.device = DEVICES["cpu"]
) -> list[dict[str, Any]]:
    """Measure every shape with every routing. Collective over the default process group.

    Returns:
        One record per shape and routing, the same on every rank; see docs/dispatch_benchmark.md.

    Raises:
        ValueError: An arm cannot run, or it moves other rows than it should.
    """
    records = []
    for shape in job.shapes:
        arms, floors, left_out = _build(job, shape, device)
        try:
            for kind in job.routings:
                case = Case(job, shape, kind, device, arms, floors)
                records.append({**_measure(case, say), "left_out": left_out})
                gc.collect()
        finally:
            for arm in [*arms, *floors]:
                arm.close()
    return records


def _build(
    job: Job, shape: LayerShape, device: torch.device
) -> tuple[list[DispatcherArm], list[DispatchArm], dict[str, str]]:
    conf, dtype = Path(job.conf), DTYPES[job.dtype]
    arms: list[DispatcherArm] = []
    floors: list[DispatchArm] = []
    left_out: dict[str, str] = {}
    for name in job.arms:
        try:
            arms.append(DispatcherArm(name, shape, conf=conf, dtype=dtype, device=device))
        except ValueError as error:
            if job.strict:
                raise
            left_out[name] = str(error)
    if not arms:
        raise ValueError("; ".join(left_out.values()) or "arms: none asked for")
    for name in job.floors:
        under = next((arm for arm in arms if arm.name == name), None)
        if under is None:
            left_out.update({f"{kind} of {name}": "the arm itself is not there" for kind in FLOORS})
        elif dist.get_world_size() == 1:
            left_out.update({f"{kind} of {name}": "one rank: nothing travels" for kind in FLOORS})
        else:
            floors += [kind(under, conf=conf, dtype=dtype) for kind in (ExchangeFloor, BareFloor)]
    return arms, floors, left_out


def _measure(case: Case, say: Callable[[str], None]) -> dict[str, Any]:
    shape, world_size = case.shape, dist.get_world_size()
    say(f"shape {shape.name}, {world_size} rank(s), routing {case.kind}: checking {len(case.arms)} arms")
    errors = _check(case)
    traffic = {arm.name: _bytes(arm, case.given(CHECKED)) for arm in case.arms}
    arms: list[DispatchArm] = [*case.arms, *case.floors]
    load_before = os.getloadavg()
    seconds, static = _time(case, arms)
    load_after = os.getloadavg()
    given = case.given(CHECKED)
    draw = case.draw(CHECKED)
    need = necessary(draw.ids, shape, world_size=world_size, value_bytes=given.x.element_size())
    records = {}
    for number, arm in enumerate(arms):
        records[arm.name] = {
            "kind": arm.kind,
            "transport": arm.transport,
            "starts": [{"environment": 0, "rounds_ms": _milliseconds(seconds[:, number])}],
            "peak_memory_bytes": _peak(arm, given),
            **traffic.get(arm.name, {"bytes": None}),
            "static": static.get(arm.name),
            **errors.get(arm.name, {}),
        }
    return {
        "shape": shape.name,
        "tokens": shape.tokens,
        "hidden_size": shape.hidden_size,
        "expert_hidden_size": shape.expert_hidden_size,
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "world_size": world_size,
        "expert_parallel_size": world_size,
        "routing": {
            "kind": case.kind,
            **describe_ids(shape, draw.ids, world_size=world_size),
            "hash": case.hash.value(),  # of all rounds
        },
        "necessary_bytes": {
            "row": need.row_bytes,
            "dispatch": need.dispatched,
            "combine": need.combined,
            "cycle": need.of_cycle,
            "logical": need.logical,
        },
        "load_average": {"before": list(load_before), "after": list(load_after)},
        "arms": records,
    }


def _time(case: Case, arms: Sequence[DispatchArm]) -> tuple[Tensor, dict[str, dict[str, Any]]]:
    """Time all arms; says also what the static ones needed while they were timed."""
    for arm in case.arms:
        arm.dispatcher.reset_needed()

    def measure(number: int, index: int) -> list[float]:
        arm, given = arms[number], case.given(index)
        arm.prepare(given)
        times = [timed(getattr(arm, part), case.device) for part in PARTS]
        arm.clear()
        arm.prepare(given)
        times.append(timed(arm.cycle, case.device))
        arm.clear()
        return times

    job = case.job
    seconds = time_rounds(
        len(arms),
        measure,
        parts=len(PARTS) + 1,
        rounds=job.rounds,
        warmup=job.warmup,
        seed=job.order_seed,
    )
    return seconds, {arm.name: _static(arm, case) for arm in case.arms if arm.budget is not None}


def _static(arm: DispatcherArm, case: Case) -> dict[str, Any]:
    """Budget, need and losses of the timed rounds. Collective."""
    needed, dropped, budget = arm.dispatcher.needed(), arm.dispatcher.dropped(), arm.budget
    assert needed is not None and dropped is not None and budget is not None
    most, lost = needed.max().reshape(1).cpu(), dropped.sum().reshape(1).cpu()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(lost)
    plans = 2 * (case.job.rounds + case.job.warmup)
    routes = plans * case.shape.tokens * case.shape.top_k * dist.get_world_size()
    return {
        "capacity_factor": arm.cfg.dispatcher.capacity_factor,
        "budget_rows": budget,
        "needed_rows": int(most),
        "dropped_share": int(lost) / routes,
        "needed_bytes": activation_bytes(int(most), case.shape, value_bytes=case.x.element_size()),
    }


def _check(case: Case) -> dict[str, dict[str, Any]]:
    """Every arm against the computation without an exchange, and against the first arm. Collective.

    Raises:
        ValueError: An arm is wrong; nothing is timed then.
    """
    scales = make_scales(case.shape, case.device, seed=case.job.seed)
    given, errors = case.given(CHECKED), {}
    first: Outcome | None = None
    for arm in case.arms:
        found, away = check_arm(arm, given, scales, precision=case.job.dtype)
        errors[arm.name] = {"error": away, "error_to_first": None, "dropped_in_check": found.dropped}
        first = first or found
        if found.dropped == first.dropped == 0:
            to_first = distance(found, first)
            judge(f"{arm.name} beside {case.arms[0].name}", to_first, precision_of(arm, case.job.dtype))
            errors[arm.name]["error_to_first"] = to_first
    return errors


def _bytes(arm: DispatcherArm, given: Given) -> dict[str, Any]:
    """Bytes that each rank sends in each part, and the most that a rank sends or receives. Collective."""
    arm.prepare(given)
    channel, parts = arm.channel, {}
    said = dist.get_world_size() == 1 or arm.transport in (None, "torch")
    if channel is not None:
        channel.spans = []
    for part in PARTS:
        before = arm.dispatcher.bytes_sent(), arm.dispatcher.metadata_bytes_sent()
        arrived = 0 if channel is None else len(channel.spans or ())
        getattr(arm, part)()
        sent = arm.dispatcher.bytes_sent() - before[0]
        metadata = arm.dispatcher.metadata_bytes_sent() - before[1]
        spans = [] if channel is None else (channel.spans or [])[arrived:]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            everyone, (sent - metadata, metadata, sum(span.received_bytes for span in spans))
        )
        rows, metadata_of_all, received = map(list, zip(*everyone))
        busiest = max(max(a + b, c) for a, b, c in everyone)
        parts[part] = {"rows": rows, "metadata": metadata_of_all, "received": received, "busiest": busiest}
    if channel is not None:
        channel.spans = None
    rows_held = torch.tensor([arm.received.rows.shape[0]])
    dist.all_reduce(rows_held, op=dist.ReduceOp.MAX)
    arm.clear()
    pinned = activation_bytes(int(rows_held), arm.shape, value_bytes=given.x.element_size())
    return {"bytes": parts if said else None, "buffer_rows": int(rows_held), "pinned_bytes": pinned}


def _peak(arm: DispatchArm, given: Given) -> int | None:
    """How far memory grows in one cycle, of the rank where it grows most. Collective."""
    arm.prepare(given)
    growth = peak_on(given.x.device, arm.cycle)
    arm.clear()
    largest = torch.tensor([-1 if growth is None else growth])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return None if int(largest) < 0 else int(largest)


def _milliseconds(seconds: Tensor) -> dict[str, list[float]]:
    """`[rounds, 5]` seconds -> per part and for the cycle, every round."""
    columns = seconds.t().tolist()
    return {
        part: [round(1e3 * value, 4) for value in column] for part, column in zip((*PARTS, "cycle"), columns)
    }
