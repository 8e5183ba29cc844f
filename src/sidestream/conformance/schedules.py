"""What every overlap schedule promises, on a small model whose experts live on all ranks. Collective.

Legend: B sequences, S tokens per sequence, H features.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.conformance.serial import SerialLog
from sidestream.conformance.suite import Property
from sidestream.conformance.values import output_problem
from sidestream.data.batch import IGNORE, Batch
from sidestream.dispatch.alltoall import AllToAllDispatcher
from sidestream.exchange.link import NativeLink
from sidestream.fusion.grouped import GroupedExperts
from sidestream.model.block import MoEUnit
from sidestream.model.config import ModelShape
from sidestream.model.transformer import MoETransformer
from sidestream.overlap.base import completed
from sidestream.overlap.none import NoOverlap
from sidestream.parallel.assemble import assemble
from sidestream.parallel.mesh import Parallel, build_parallel
from sidestream.routing.balance import NoBalance
from sidestream.routing.router import SoftmaxRouter

SEQUENCES, LENGTH = 4, 12
_CLOSE = 1e-4  # of a gradient's largest value: sums in another order

Make = Callable[[], Any]


@cache
def _parallel() -> Parallel:
    return build_parallel(
        expert_parallel_size=dist.get_world_size(), device_type="cpu", timeout=timedelta(seconds=60)
    )


def _model(schedule: Any) -> MoETransformer:
    """Dense and MoE blocks in turn, from one seed."""
    gates = bool(completed(schedule).double_gating)  # such a schedule has two routings, and no shared expert
    dispatcher: Any = AllToAllDispatcher()
    shape = ModelShape(
        vocab_size=64,
        num_layers=4,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=48,
        moe_layers=(1, 3),
        num_experts=4 * dist.get_world_size(),
        expert_hidden_size=32,
        num_shared_experts=0 if gates else 1,
        dropout=0.0,
        activation_checkpointing=False,
        rope_theta=10000.0,
        norm_eps=1e-5,
        init_std=0.2,
    )
    return assemble(
        shape,
        router=SoftmaxRouter(top_k=1 if gates else 2),
        balance=NoBalance(),
        dispatcher=dispatcher,
        fusion=GroupedExperts(),
        schedule=schedule,
        link=NativeLink(),
        parallel=_parallel(),
        seed=3,
        device=torch.device("cpu"),
        max_tokens=SEQUENCES * LENGTH,
    )


def _batch(sequences: int = SEQUENCES, *, padded: bool = False) -> Batch:
    draw = torch.Generator().manual_seed(10 + dist.get_rank())
    batch = Batch.of(torch.randint(0, 64, (sequences, LENGTH + 1), generator=draw))
    if not padded:
        return batch
    segments = (torch.arange(LENGTH) >= LENGTH // 2).int().repeat(sequences, 1)
    segments[:, -3:] = -1
    return Batch(batch.inputs, batch.targets.masked_fill(segments < 0, IGNORE), segments)


def _gradients(schedule: Any, batch: Batch, *, enabled: bool) -> dict[str, Tensor]:
    """Loss and gradients of this rank, in the mode of evaluation: nothing is measured or drawn."""
    schedule.enabled = enabled
    model = _model(schedule).eval()
    loss = model.loss_sums(batch).nll
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.parts.dispatcher.close()  # finds a transfer that nobody waited for
    return {"loss": loss.detach(), **found}


def _attributes(make: Make) -> str | None:
    schedule = make()
    for name, kind in (("name", str), ("enabled", bool), ("changes_model", bool)):
        if not isinstance(value := getattr(schedule, name, None), kind):
            return f"{name} is {value!r}, expected a {kind.__name__}"
    return None


def _runs(make: Make) -> str | None:
    """Shapes, every routing reported once, every transfer finished."""
    model = _model(make()).train()
    problems: list[str | None] = []

    def look(unit: MoEUnit, inputs: Any, output: Any) -> None:
        problems.append(output_problem("its result", output, like=inputs[0]))
        if pending := model.parts.dispatcher.channel.pending:  # type: ignore[attr-defined]
            problems.append(f"{pending} transfers that it started are not finished when it returns")

    for unit in model.blocks:
        if isinstance(unit, MoEUnit):
            unit.register_forward_hook(look)
    batch = _batch()
    try:
        model.loss_sums(batch)
        model.parts.dispatcher.close()
    except Exception:
        if any(problems):  # what was seen first is the cause
            return next(problem for problem in problems if problem is not None)
        raise
    gates = 2 if model.schedule.double_gating else 1
    wanted = gates * batch.inputs.numel() * model.parts.router.top_k
    reported = model.ledger.counts.sum(1).tolist()
    if any(count != wanted for count in reported):
        problems.append(
            f"{reported} routes are reported per layer, expected {wanted}: call unit.moe.report once each"
        )
    return next((problem for problem in problems if problem is not None), None)


def _same_bits(make: Make) -> str | None:
    for sequences in (SEQUENCES, 3, 1):
        overlapped, serial = (_gradients(make(), _batch(sequences), enabled=on) for on in (True, False))
        differing = [name for name, value in overlapped.items() if not torch.equal(value, serial[name])]
        if differing or overlapped.keys() != serial.keys():
            what = differing[0] if differing else "the set of gradients"
            return f"with {sequences} sequences {what} differs between enabled=true and false; see overlap/fork.py"
    return None


def _is_serial(make: Make) -> str | None:
    with SerialLog() as log:
        _gradients(make(), _batch(), enabled=False)
    return log.problem()


def _same_function(make: Make) -> str | None:
    for padded in (False, True):
        batch = _batch(padded=padded)
        found, right = (_gradients(schedule, batch, enabled=True) for schedule in (make(), NoOverlap()))
        for name, value in right.items():
            if name not in found:
                return f"{name} gets no gradient"
            error = float((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-9))
            if not error <= _CLOSE:
                where = "with padding" if padded else "without padding"
                return f"{name} differs from overlap=none by {error:.2g} {where}; say changes_model=True if it may"
    return None


def _padding(make: Make) -> str | None:
    found = _gradients(make(), _batch(padded=True), enabled=True)
    wrong = [name for name, value in found.items() if not bool(value.isfinite().all())]
    return f"{wrong[0]} is not finite with padding" if wrong else None


def _sizes(make: Make) -> str | None:
    schedule = make()
    model = _model(schedule).eval()
    dispatcher: Any = model.parts.dispatcher
    plan, largest = dispatcher.plan, []

    def noted(routing: Any, **options: Any) -> Any:
        largest.append(routing.expert_ids.shape[0])
        return plan(routing, **options)

    dispatcher.plan = noted
    promised = schedule.tokens_per_plan(SEQUENCES, LENGTH, padding=0)
    model.loss_sums(_batch())
    dispatcher.close()
    if max(largest) <= promised:
        return None
    return f"tokens_per_plan promises at most {promised} tokens, and a plan has {max(largest)}"


SCHEDULE = [
    Property("attributes", _attributes),
    Property("shapes, every routing reported, every transfer finished", _runs),
    Property("enabled=false gives the same bits, for 4, 3 and 1 sequences", _same_bits),
    Property("enabled=false is serial: nothing is computed while rows travel, in both passes", _is_serial),
    Property(
        "the function of overlap=none, also with padding",
        _same_function,
        lambda make: not make().changes_model,
    ),
    Property("padding", _padding, lambda make: make().changes_model),
    Property("tokens_per_plan", _sizes, lambda make: hasattr(make(), "tokens_per_plan")),
]
