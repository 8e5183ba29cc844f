"""The layer benchmark on one rank: build the arms, check them against the reference, time them, weigh them.

Legend: T tokens of this rank, D features.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.measure import peers
from sidestream.measure.arms import GEMM, Arm, dense_arm, gemm_arm, sidestream_arm
from sidestream.measure.dispatch_routing import activation_bytes
from sidestream.measure.peak_memory import peak_growth
from sidestream.measure.problem import (
    Answer,
    Weights,
    describe_routing,
    make_output_gradient,
    make_tokens,
    make_weights,
    reference,
)
from sidestream.measure.sent_bytes import CountBytes
from sidestream.measure.shapes import LayerShape
from sidestream.profiling.rounds import barrier, time_rounds

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Largest accepted distance from the fp32 reference, |arm - reference| / |reference|: of a whole tensor, and of the
# worst token of the output and of the input's gradient, which a single wrong route would push to about 1.
TOLERANCE = {"bf16": 2e-2, "fp32": 1e-4}
TOLERANCE_OF_A_TOKEN = {"bf16": 5e-2, "fp32": 1e-3}
AUTO_ARMS = ("sidestream/local+grouped", "sidestream/alltoall+grouped")


@dataclass(frozen=True)
class Job:
    """What one group of ranks has to measure.

    Attributes:
        shapes: One after another, in one process group.
        arms: `sidestream/<dispatcher>+<fusion>[,<override>...]`.
        peers: Names from `peers.PEERS`.
        dtype: `bf16` or `fp32`.
        rounds, warmup: With fresh tokens, and so fresh routing, in every call.
        frozen_rounds: Afterwards with the same tokens every round; 0: none.
        conf: Folder of the Hydra configuration.
    """

    shapes: list[LayerShape]
    arms: list[str]
    peers: list[str]
    dtype: str
    rounds: int
    warmup: int
    frozen_rounds: int
    skew: float
    skew_order: str
    seed: int
    conf: str

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Job:
        return cls(**{**plain, "shapes": [LayerShape(**shape) for shape in plain["shapes"]]})


@dataclass
class Case:
    """One shape on this rank."""

    job: Job
    shape: LayerShape
    weights: Weights
    arms: list[Arm]
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.job.dtype]

    def tokens(self, draw: int) -> Tensor:
        return make_tokens(
            self.shape,
            self.weights.gate,
            dtype=self.dtype,
            seed=self.job.seed,
            draw=draw,
            rank=dist.get_rank(),
        )


def run_plain(plain: dict[str, Any], *, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """`run_job` for a job in plain types."""
    return run_job(Job.from_json(plain), say=say)


def run_job(job: Job, *, say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Measure every shape. Collective over the default process group, which exists also for one rank.

    Returns:
        One record per shape, the same on every rank; see docs/layer_benchmark.md.

    Raises:
        ValueError: A peer is missing, or an arm does not agree with the reference.
    """
    builders = {name: peers.load(name) for name in job.peers}  # before anything takes time
    records = []
    for shape in job.shapes:
        case = _build(job, shape, builders)
        try:
            records.append(_measure(case, say))
        finally:
            for arm in case.arms:
                arm.close()
        del case
        gc.collect()
    return records


def _build(job: Job, shape: LayerShape, builders: dict[str, peers.Builder]) -> Case:
    dtype = DTYPES[job.dtype]
    weights = make_weights(
        shape,
        dtype=dtype,
        seed=job.seed,
        skew=job.skew,
        skew_order=job.skew_order,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    case = Case(job, shape, weights, [dense_arm(shape, dtype=dtype, seed=job.seed)])
    if GEMM in job.arms:
        case.arms.append(gemm_arm(shape, weights, dtype=dtype))
    for name in [name for name in job.arms if name != GEMM] or AUTO_ARMS:
        try:
            arm = sidestream_arm(
                name, shape, weights, conf=Path(job.conf), dtype=dtype, group=dist.group.WORLD
            )
        except ValueError as error:
            if job.arms and dist.get_world_size() == 1:
                raise
            case.left_out[name] = str(error)
        else:
            case.arms.append(arm)
    if not any(arm.kind == "sidestream" for arm in case.arms):
        raise ValueError("; ".join(case.left_out.values()))
    case.arms += [build(shape, weights, dtype) for build in builders.values()]
    for arm in case.arms:
        arm.module.train()
    return case


def _measure(case: Case, say: Callable[[str], None]) -> dict[str, Any]:
    job, shape, rank = case.job, case.shape, dist.get_rank()
    output_gradient = make_output_gradient(shape, dtype=case.dtype, seed=job.seed, rank=rank)
    x = case.tokens(-1)  # not one of the rounds
    say(
        f"shape {shape.name}, {dist.get_world_size()} rank(s): checking {len(case.arms)} arms, then timing them"
    )
    _leave_out_overflowing(case, x)
    errors = check(case, x, output_gradient)
    for arm in case.arms:
        if arm.dispatcher is not None:
            arm.dispatcher.reset_needed()
    gc.collect()
    load_before = os.getloadavg()
    fresh, frozen = _time(case, x, output_gradient)
    load_after = os.getloadavg()
    static = [_static(arm, case) for arm in case.arms]
    sent, peak = _bytes_and_memory(case.arms, x, output_gradient)
    arms = {}
    for number, arm in enumerate(case.arms):
        arms[arm.name] = {
            "kind": arm.kind,
            "rounds_ms": _milliseconds(fresh[:, number]),
            "frozen_rounds_ms": None if frozen is None else _milliseconds(frozen[:, number]),
            "peak_memory_bytes": peak[number],
            "bytes_on_wire": sent[number],
            "error": errors.get(arm.name),
            "transport": None if arm.dispatcher is None else arm.dispatcher.transport,
            "static": static[number],
        }
    return {
        "shape": shape.name,
        "tokens": shape.tokens,
        "hidden_size": shape.hidden_size,
        "expert_hidden_size": shape.expert_hidden_size,
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
        "flops_per_token": shape.flops_per_token,
        "world_size": dist.get_world_size(),
        "expert_parallel_size": dist.get_world_size(),
        "routing": describe_routing(shape, case.weights.gate, x, world_size=dist.get_world_size()),
        "load_average": {"before": list(load_before), "after": list(load_after)},
        "left_out": case.left_out,
        "arms": arms,
    }


def _time(case: Case, x: Tensor, output_gradient: Tensor) -> tuple[Tensor, Tensor | None]:
    """Seconds with fresh tokens in every call, and with `x` in every call where that is asked for."""
    job = case.job

    def rounds(count: int, tokens: Callable[[int], Tensor]) -> Tensor:
        return run_rounds(
            case.arms,
            tokens=tokens,
            output_gradient=output_gradient,
            rounds=count,
            warmup=job.warmup,
            seed=job.seed,
        )

    fresh = rounds(job.rounds, case.tokens)
    return fresh, rounds(job.frozen_rounds, lambda _: x) if job.frozen_rounds else None


def _leave_out_overflowing(case: Case, x: Tensor) -> None:
    """Close static arms that lose routes of `x`: they would do less work than the others. Collective."""
    for arm in list(case.arms):
        if arm.dispatcher is None or arm.dispatcher.budget is None:
            continue
        arm.forward(x)
        found = _static(arm, case)
        assert found is not None
        if found["dropped_routes"]:
            routes = case.shape.tokens * case.shape.top_k
            enough = math.ceil(100 * found["needed_rows"] / routes) / 100
            case.left_out[arm.name] = (
                f"{found['dropped_routes']} of {routes * dist.get_world_size()} routes find no room in "
                f"{found['budget_rows']} rows per rank; expected dispatcher.capacity_factor={enough} or more"
            )
            case.arms.remove(arm)
            arm.close()


def _static(arm: Arm, case: Case) -> dict[str, int] | None:
    """Budget of a static arm, the most rows a rank needed and the routes of all ranks that were lost. Collective."""
    dispatcher = arm.dispatcher
    if dispatcher is None or dispatcher.budget is None:
        return None
    needed, dropped = dispatcher.needed(), dispatcher.dropped()
    assert needed is not None and dropped is not None
    most, lost = needed.max().reshape(1), dropped.sum().reshape(1)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_reduce(lost)
    value_bytes = case.dtype.itemsize
    return {
        "budget_rows": dispatcher.budget,
        "needed_rows": int(most),
        "dropped_routes": int(lost),
        "pinned_bytes": activation_bytes(dispatcher.budget, case.shape, value_bytes=value_bytes),
    }


def _milliseconds(seconds: Tensor) -> dict[str, list[float]]:
    """`[rounds, 2]` seconds -> per round, forward and both passes."""
    rounded = [[round(1e3 * value, 4) for value in row] for row in seconds.tolist()]
    return {
        "forward": [forward for forward, _ in rounded],
        "forward_backward": [round(forward + backward, 4) for forward, backward in rounded],
    }


def check(case: Case, x: Tensor, output_gradient: Tensor) -> dict[str, dict[str, float]]:
    """Compare every arm's output and gradients with the fp32 reference. Collective.

    Returns:
        Arm -> relative error of each tensor, the largest over the ranks.

    Raises:
        ValueError: An error is above its tolerance.
    """
    answer = reference(case.shape, case.weights, x, output_gradient)
    errors = {}
    for arm in case.arms:
        if arm.grads is None:
            continue
        arm.clear_gradients()
        leaf = x.detach().requires_grad_()
        output = arm.forward(leaf)
        output.backward(output_gradient)
        assert leaf.grad is not None
        found = Answer(output.detach(), {"x": leaf.grad, **arm.grads()})
        arm.clear_gradients()
        errors[arm.name] = _distance(found, answer)
        _judge(arm.name, errors[arm.name], case.job.dtype)
    return errors


def _distance(found: Answer, answer: Answer) -> dict[str, float]:
    names, values = [], []
    for name, wanted in {"output": answer.output, **answer.grads}.items():
        got = found.output if name == "output" else found.grads[name]
        difference = got.float() - wanted
        names.append(name)
        values.append(difference.norm() / wanted.norm().clamp_min(1e-12))
        if name in ("output", "x"):
            names.append(f"{name}_worst_token")
            values.append((difference.norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-12)).max())
    largest = torch.stack(values).double().nan_to_num(nan=torch.inf)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return dict(zip(names, largest.tolist()))


def _judge(arm: str, errors: dict[str, float], dtype: str) -> None:
    for name, error in errors.items():
        tolerance = (TOLERANCE_OF_A_TOKEN if name.endswith("worst_token") else TOLERANCE)[dtype]
        if not error <= tolerance:
            raise ValueError(
                f"{arm}: relative error of {name} against the fp32 reference is {error:.2g}; expected at most "
                f"{tolerance:g} in {dtype}; not timed"
            )


def _bytes_and_memory(
    arms: Sequence[Arm], x: Tensor, output_gradient: Tensor
) -> tuple[list[int], list[int | None]]:
    """Bytes sent by all ranks, and the largest growth of a rank's resident set, each in one forward and backward."""
    sent, peak = [], []
    for arm in arms:
        before = 0 if arm.dispatcher is None else arm.dispatcher.bytes_sent()
        with CountBytes() as counter:
            _pass(arm, x, output_gradient)
        if counter.calls and arm.dispatcher is not None:
            counter.sent += arm.dispatcher.bytes_sent() - before
        growth = peak_growth(lambda arm=arm: call(arm, x, output_gradient))  # type: ignore[misc]
        arm.clear_gradients()
        numbers = torch.tensor([counter.sent, -1 if growth is None else growth])
        total, largest = numbers.clone(), numbers
        dist.all_reduce(total)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        sent.append(int(total[0]))
        peak.append(None if int(largest[1]) < 0 else int(largest[1]))
    return sent, peak


def _pass(arm: Arm, x: Tensor, output_gradient: Tensor) -> None:
    arm.forward(x.detach().requires_grad_()).backward(output_gradient)
    arm.clear_gradients()


def call(arm: Arm, x: Tensor, output_gradient: Tensor) -> tuple[float, float]:
    """One forward and one backward of an arm, from cleared gradients.

    Returns:
        Seconds of this rank, forward and backward.
    """
    arm.clear_gradients()
    leaf = x.detach().requires_grad_()
    barrier()
    begin = time.perf_counter()
    output = arm.forward(leaf)
    forward = time.perf_counter() - begin
    barrier()
    begin = time.perf_counter()
    output.backward(output_gradient)
    backward = time.perf_counter() - begin
    barrier()
    return forward, backward


def run_rounds(
    arms: Sequence[Arm],
    *,
    tokens: Callable[[int], Tensor],
    output_gradient: Tensor,
    rounds: int,
    warmup: int,
    seed: int,
) -> Tensor:
    """Time all arms of the layer benchmark. Collective.

    Args:
        tokens: Number of a draw -> `[T, D]`; every call has a draw of its own. The GEMM library keeps its kernels by
            row count for the whole process: with common tokens the first arm of a round would build those of the
            others.
        output_gradient: `[T, D]`.
        rounds: Rounds that count.
        warmup: Rounds before them that do not.

    Returns:
        `[rounds, arms, 2]` float64 seconds of the slowest rank, forward and backward.
    """

    def measure(number: int, index: int) -> tuple[float, float]:
        times = call(arms[number], tokens(index * len(arms) + number), output_gradient)
        arms[number].clear_gradients()
        return times

    return time_rounds(len(arms), measure, parts=2, rounds=rounds, warmup=warmup, seed=seed)
