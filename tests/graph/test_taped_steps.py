"""A step graph between the parts of a step: addresses, traces of a capture, overflow, what a replay does not run."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from sidestream.data.batch import Batch
from sidestream.graph import step as step_graph
from sidestream.graph import tape
from sidestream.graph.none import NoGraph
from sidestream.graph.step import StepGraph
from sidestream.graph.tape import CaptureError, Tape
from sidestream.overlap.chunked import ChunkedOverlap
from sidestream.overlap.shared_expert import SharedExpertOverlap
from sidestream.overlap.shortcut import ShortcutOverlap
from sidestream.overlap.two_batch import TwoBatchOverlap
from sidestream.parallel.overflow import BudgetKeeper
from sidestream.parallel.reduction import local
from sidestream.parallel.step import TrainingStep
from tests.core.build_tiny import (
    BALANCES,
    ROUTERS,
    SHAPE,
    Setup,
    full,
    local_batch,
    make_model,
    make_optimizer,
    make_reduction,
    parallel_for,
)
from tests.core.pairwise import cover
from tests.rank_pool import ranks

CPU = torch.device("cpu")
DISPATCHERS = ("nccl_ep", "deep_ep", "alltoall", "allgather", "hybrid_ep")
STATIC = Setup(
    dispatcher="nccl_ep", ep=2, capacity_factor=4.0, router="jitter", balance="bias", accumulation=2
)
# The tape's memory holds NaN before the first replay: whoever reads what it has not written is found out.
POISONED = partial(Tape, poison=True)


class Run:
    """Model, step and optimizer of one rank, with a graph."""

    def __init__(self, rank: int, world: int, setup: Setup, *, graph: Any) -> None:
        self.rank, self.world, self.setup, self.graph = rank, world, setup, graph
        self.model, parallel = make_model(setup), parallel_for(setup.ep)
        reduction = make_reduction(setup)
        graph.open(CPU, lambda: None)
        reduction.attach(self.model, parallel)
        parts = self.model.parts
        per_rank = setup.global_batch // world // setup.accumulation
        self.budget = BudgetKeeper(
            parts.dispatcher,
            parallel,
            device=CPU,
            mean_rows=per_rank * setup.seq_length * setup.top_k,
        )
        self.step = TrainingStep(
            self.model,
            parallel=parallel,
            reduction=reduction,
            global_batch_size=setup.global_batch,
            micro_batch_size=per_rank,
            budget=self.budget,
            autocast=setup.autocast,
        )
        self.optimizer = make_optimizer(setup, self.step.params)
        self.seen: dict[str, list[Any]] = {"loss": [], "norm": [], "grads": []}

    def attempt(self, batch: Batch) -> None:
        bound = self.graph.bind(batch)
        while True:
            self.step.prepare(bound)
            self.graph.run(
                lambda: self.step.run(bound),
                key=self.model.parts.dispatcher.budget,
                ready=True,
                rehearsal=lambda: self.step.rehearsal(bound),
            )
            self.report = self.step.check()
            if self.budget.resolve(overflowed=self.report.overflowed, dropped=self.report.lost):
                return

    def train(self, index: int, *, skew: float = 0.0) -> None:
        for moe in self.model.moe_layers() if skew else ():
            moe.selection_bias.zero_()[: self.setup.shape.num_experts // 2] = skew
        self.attempt(local_batch(self.setup, index, self.rank, self.world))
        self.seen["grads"].append([local(p.grad).clone() for p in self.step.params])  # type: ignore[arg-type]
        norm = self.step.commit(self.report, optimizer_step=self.optimizer.step, max_norm=self.setup.max_norm)
        self.seen["loss"].append(self.report.loss)
        self.seen["norm"].append(float(norm))

    def close(self) -> dict[str, Any]:
        self.seen["params"] = [[full(p) for p in self.step.params]]
        self.graph.close()
        self.step.close()
        self.model.parts.dispatcher.close()
        return self.seen


def new_graph(*, taped: bool, **options: Any) -> Any:
    return StepGraph(backend="tape", **options) if taped else NoGraph()


def trained(rank: int, world: int, setup: Setup, *, taped: bool, steps: int = 4) -> dict[str, Any]:
    with mock.patch.object(tape, "Tape", POISONED):
        run = Run(rank, world, setup, graph=new_graph(taped=taped))
        for index in range(steps):
            run.train(index)
        counts = run.graph.counts()
        return run.close() | {"counts": counts}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in ("loss", "norm"):
        assert one[name] == other[name], name
    for name in ("grads", "params"):
        for mine, theirs in zip(one[name], other[name], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), name


def both(world: int, setup: Setup, **options: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return tuple(ranks(world).run(trained, setup=setup, taped=taped, **options) for taped in (False, True))  # type: ignore[return-value]


RECOMPUTE = SHAPE.__class__(**{**vars(SHAPE), "activation_checkpointing": True, "dropout": 0.1})
BOTH_ROUTERS = [
    pytest.param(name, marks=() if name == "capacity" else pytest.mark.full)
    for name in ROUTERS
    if name != "capacity_padded"  # has no budget: refused together with a capacity factor
]
BOTH_BALANCES = [
    pytest.param(name, marks=() if name == "quantile" else pytest.mark.full) for name in BALANCES
]


@pytest.mark.parametrize("router", BOTH_ROUTERS)
@pytest.mark.full
def test_every_router_can_be_captured(router: str) -> None:
    eager, taped = both(2, STATIC.with_(router=router), steps=4)
    for one, other in zip(eager, taped):
        assert_equal(one, other)
        assert other["counts"].replays == 2


@pytest.mark.parametrize("balance", BOTH_BALANCES)
def test_every_balance_can_be_captured(balance: str) -> None:
    eager, taped = both(2, STATIC.with_(balance=balance, accumulation=1), steps=4)
    for one, other in zip(eager, taped):
        assert_equal(one, other)


@pytest.mark.parametrize(
    "changes",
    [
        {"autocast": True, "alignment": 16, "shape": RECOMPUTE},
        {"padded": True},
        {
            "schedule": partial(ShortcutOverlap, slot=1, double_gating=True),
            "top_k": 1,
            "shape": SHAPE.__class__(**{**vars(SHAPE), "num_shared_experts": 0}),
        },
        {"schedule": partial(ChunkedOverlap, num_chunks=2, delay_wgrad=True), "shape": RECOMPUTE},
    ],
    ids=["bf16_recompute", "padding", "double_gating", "late_weights"],
)
@pytest.mark.sample(2)
def test_features_in_a_graph(changes: dict[str, Any]) -> None:
    eager, taped = both(2, STATIC.with_(**changes), steps=4)
    for one, other in zip(eager, taped):
        assert_equal(one, other)


SCHEDULES = {
    "none": None,
    "shared_expert": SharedExpertOverlap,
    "shortcut": partial(ShortcutOverlap, slot=1),
    "chunked": ChunkedOverlap,
    "two_batch": TwoBatchOverlap,
    "late": partial(SharedExpertOverlap, delay_wgrad=True),
}
PAIRS = cover([*product(DISPATCHERS, SCHEDULES, (1, 2), (1, 2))], 2)


@pytest.mark.full
@pytest.mark.parametrize(("dispatcher", "schedule", "accumulation", "ep"), PAIRS)
def test_every_schedule_with_every_dispatcher_can_be_captured(
    dispatcher: str, schedule: str, accumulation: int, ep: int
) -> None:
    setup = STATIC.with_(
        dispatcher=dispatcher, schedule=SCHEDULES[schedule], accumulation=accumulation, ep=ep
    )
    eager, taped = both(2, setup, steps=4)
    for one, other in zip(eager, taped):
        assert_equal(one, other)
        assert other["counts"].replays == 2


# ---- Overflow


def overflowing(rank: int, world: int, setup: Setup, *, taped: bool) -> dict[str, Any]:
    run = Run(rank, world, setup, graph=new_graph(taped=taped))
    for index in range(9):
        run.train(index, skew=8.0 if index == 5 else -8.0 if index == 6 else 0.0)
    counts, budget = run.graph.counts(), run.model.parts.dispatcher.budget
    return run.close() | {"counts": counts, "budget": budget, "replayed": run.budget.counts.replays}


@pytest.mark.parametrize(
    "dispatcher",
    [pytest.param(d, marks=() if d in ("nccl_ep", "deep_ep") else pytest.mark.full) for d in DISPATCHERS],
)
@pytest.mark.sample(1)
def test_an_overflow_of_a_replayed_step_grows_the_budget_and_captures_anew(dispatcher: str) -> None:
    # 256 rows a rank when balanced and 512 when one rank gets all; the budget is 384 (factor of 512 tokens).
    setup = STATIC.with_(dispatcher=dispatcher, global_batch=32)
    large = ranks(2).run(overflowing, setup=setup, taped=False)
    small = ranks(2).run(overflowing, setup=setup.with_(capacity_factor=0.32), taped=True)
    for one, other in zip(large, small):
        assert other["replayed"] >= 1 and one["replayed"] == 0
        assert other["counts"].captures == 2, "the overflow was not in a captured step"
        assert_equal(one, other)


# ---- Addresses, and traces of a capture


def pointers(rank: int, world: int) -> list[list[int]]:
    run = Run(rank, world, STATIC, graph=new_graph(taped=True))
    found = []
    for index in range(6):
        run.train(index)
        for parameter in run.step.params if index == 3 else ():
            parameter.grad = None  # as Lightning does before a validation
        tensors: list[Tensor] = [run.graph._static.batch.inputs, run.graph._static.batch.targets]
        tensors += [local(p) for p in run.step.params]
        if index != 3:
            tensors += [local(p.grad) for p in run.step.params]  # type: ignore[arg-type]
            found.append([tensor.data_ptr() for tensor in tensors])
    run.close()
    return found


def test_addresses_of_inputs_parameters_and_gradients_never_change() -> None:
    for found in ranks(2).run(pointers):
        assert all(each == found[0] for each in found)


def traces(rank: int, world: int) -> dict[str, bool]:
    """What a capture changed of what lasts."""
    run = Run(rank, world, STATIC, graph=new_graph(taped=True))
    for index in range(2):
        run.train(index)

    def state() -> dict[str, Any]:
        moments = [v for s in run.optimizer.state.values() for v in s.values()]
        dispatcher = run.model.parts.dispatcher
        return {
            "parameters": [full(p) for p in run.step.params],
            "optimizer": [full(m) for m in moments],
            "bias": [moe.selection_bias.clone() for moe in run.model.moe_layers()],
            "random": [torch.get_rng_state()],
            "rows": [dispatcher.needed().clone(), dispatcher.dropped().clone()],
            "bytes": [torch.tensor([dispatcher.bytes_sent(), dispatcher.metadata_bytes_sent()])],
        }

    bound = run.graph.bind(local_batch(run.setup, 2, rank, world))
    run.step.prepare(bound)
    before = state()
    with mock.patch.object(Tape, "replay", return_value=None):
        run.graph.run(
            lambda: run.step.run(bound),
            key=run.model.parts.dispatcher.budget,
            ready=True,
            rehearsal=lambda: run.step.rehearsal(bound),
        )
    after = state()
    assert run.graph.counts().captures == 1
    run.close()
    return {name: all(torch.equal(a, b) for a, b in zip(before[name], after[name])) for name in before}


def test_a_capture_leaves_no_trace() -> None:
    for unchanged in ranks(2).run(traces):
        assert all(unchanged.values()), unchanged


def without_python(rank: int, world: int) -> list[Any]:
    run = Run(rank, world, STATIC, graph=new_graph(taped=True))
    for index in range(3):
        run.train(index)
    with mock.patch.object(type(run.model), "forward", side_effect=AssertionError("Python of the model ran")):
        for index in range(3, 5):
            run.train(index)
    return run.close()["loss"]


def test_a_replay_runs_no_python_of_the_model() -> None:
    eager = ranks(2).run(trained, setup=STATIC, taped=False, steps=5)
    assert [one["loss"] for one in eager] == ranks(2).run(without_python)


def transfers(rank: int, world: int, *, taped: bool) -> list[list[str]]:
    setup = STATIC.with_(schedule=SharedExpertOverlap)
    run = Run(rank, world, setup, graph=new_graph(taped=taped))
    channel, orders = run.model.parts.dispatcher.channel, []
    for index in range(4):
        order: list[str] = []
        channel.on_start = lambda tag, order=order: order.append(f"start {tag}")
        channel.on_wait = lambda tag, order=order: order.append(f"wait {tag}")
        run.train(index)
        orders.append(order)
    run.close()
    return [orders[0], orders[3]]


def test_a_replay_issues_the_exchanges_where_they_were() -> None:
    """Overlap survives: starts and waits come in the order in which the schedule put them."""
    for eager, taped in zip(ranks(2).run(transfers, taped=False), ranks(2).run(transfers, taped=True)):
        assert taped[1] == eager[0] and len(taped[1]) > 20


def larger_batch_between(rank: int, world: int, *, taped: bool) -> dict[str, Any]:
    setup = STATIC.with_(ep=1, capacity_factor=8.0, router="softmax")
    run = Run(rank, world, setup, graph=new_graph(taped=taped))
    for index in range(5):
        run.train(index)
        with torch.no_grad():
            run.model.eval()
            run.model(torch.zeros(2, 40, dtype=torch.int64))
            run.model.train()
    return run.close()


def test_a_larger_eager_batch_between_replays_changes_nothing() -> None:
    (eager,), (taped,) = (ranks(1).run(larger_batch_between, taped=taped) for taped in (False, True))
    assert_equal(eager, taped)


# ---- Refusals


def another_shape(rank: int, world: int) -> str:
    run = Run(rank, world, STATIC, graph=new_graph(taped=True))
    run.train(0)
    try:
        run.graph.bind(local_batch(STATIC.with_(seq_length=8), 0, rank, world))
    except ValueError as error:
        return str(error)
    finally:
        run.close()
    return ""


def test_a_batch_of_another_shape_is_refused() -> None:
    for message in ranks(2).run(another_shape):
        assert (
            "inputs of this batch is [4, 8] torch.int64, the first one's was [4, 16] torch.int64" in message
        )


def stale(rank: int, world: int) -> str:
    """A tensor that somebody makes anew before every step: a recording would go on reading the old one."""
    run = Run(rank, world, STATIC, graph=new_graph(taped=True))
    embedding, scale = run.model.embedding, {"now": torch.ones(())}
    handle = embedding.register_forward_hook(lambda module, args, out: out * scale["now"])
    try:
        for index in range(3):
            scale["now"] = torch.ones(())
            run.train(index)
    except CaptureError as error:
        return str(error)
    finally:
        handle.remove()
        run.close()
    return ""


def test_memory_that_is_another_in_every_step_is_an_undeclared_input() -> None:
    for message in ranks(2).run(stale):
        assert "undeclared input" in message and "test_taped_steps.py" in message


def test_an_unfinished_warm_up_waits_for_the_schedule() -> None:
    graph, calls = StepGraph(backend="tape", warmup_steps=step_graph.MIN_WARMUP), []
    graph.open(CPU, lambda: None)
    x = torch.zeros(2)

    def attempt() -> None:
        calls.append(0)
        x.add_(1)

    for ready in (True, True, False, True, True):
        graph.run(attempt, key=None, ready=ready, rehearsal=nullcontext)
    counts = graph.counts()
    assert (counts.eager, counts.captures, counts.replays) == (3, 1, 2)
    assert len(calls) == 4 and x.tolist() == [6.0, 6.0]
    graph.close()
