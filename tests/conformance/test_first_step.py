"""The first step names the user's own class that breaks a promise, on all ranks, and costs later steps nothing."""

from __future__ import annotations

import re
from contextlib import nullcontext
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from sidestream.config.errors import ConfigError
from sidestream.conformance.first_step import FirstStep
from sidestream.graph.none import NoGraph
from sidestream.overlap.none import NoOverlap
from sidestream.parallel.replicate import Replicate
from tests.conformance import broken
from tests.core import build_tiny
from tests.core.build_tiny import Setup, full, local_batch, make_model, make_optimizer, make_step
from tests.rank_pool import ranks

# class: its group, its arguments, what is said
BROKEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "Twice": ("router", {"top_k": 2}, r"expert_ids has expert . twice for token 0 \(MoE layer 0, rank 0\)"),
    "OutOfRange": ("router", {"top_k": 2}, "expert_ids has expert 10 for token .*, expected -1 to 7"),
    "WrongCounts": ("router", {"top_k": 2}, "counts has .* routes for expert 0, and the ids have"),
    "NanWeights": ("router", {"top_k": 2}, "weights is not finite at"),
    "Pair": ("router", {"top_k": 2}, "it returns a tuple, expected a Decision"),
    "OnOneRank": (
        "router",
        {"top_k": 2},
        r"expert_ids has expert . twice for token 0 \(MoE layer 1, rank 1\)",
    ),
    "VectorLoss": ("balance", {"coefficient": 0.01}, r"what loss returns has shape \[2\], expected \[\]"),
    "NanLoss": ("balance", {"coefficient": 0.01}, "what loss returns is not finite"),
    "BiasAway": ("balance", {"update_rate": 0.01}, "the selection bias after commit is not finite"),
    "Observes32": ("balance", {"ema": 0.5}, "what observe returns is float32, expected float64"),
    "LosesAToken": ("dispatcher", {}, "relative error of output is .* expected at most 0.06"),
    "ComesBackElsewhere": ("dispatcher", {}, "relative error of output is"),
    "ForgetsWeights": ("dispatcher", {}, "relative error of output is"),
    "LongOffsets": ("dispatcher", {}, "offsets is int64, expected int32"),
    "NarrowResult": ("fusion", {}, r"its result has shape \[.*, 63\], expected \[.*, 64\]"),
    "Flat": ("overlap", {}, r"its result has shape \[64, 64\], expected \[4, 16, 64\]"),
    "ForgetsToReport": ("overlap", {}, "128 routes were decided and 0 reported"),
    "ForgetsToFinish": ("overlap", {}, "transfers that it started are not finished"),
}
# Of the graph, the strategy and the optimizer, which a step has beside its model.
BESIDE = {
    "NeverAttempts": ("graph", "run does not call the attempt"),
    "NeverUpdates": ("graph", "update does not call the update"),
    "SumsNothing": ("strategy", "the gradient of .* differs between ranks that must hold the same"),
    "LeavesNan": ("optimizer", "after its step is not finite at"),
    "DriftsApart": ("optimizer", "the weight of .* differs between ranks that must hold the same"),
}
KEEP = {
    "MyRouter": ("router", {"top_k": 2}),
    "Relu": ("fusion", {}),  # another function, which is the user's business
    "Copied": ("overlap", {}),
}


class OnOneRank(broken.Twice):
    """Wrong on rank 1 only, and from its second call on."""

    calls = 0

    def edit(self, decision: Any) -> Any:
        self.calls += 1
        wrong = torch.distributed.get_rank() == 1 and self.calls > 1
        return super().edit(decision) if wrong else decision


def with_part(name: str, group: str, arguments: dict[str, Any], *, ep: int = 2) -> tuple[Setup, Any]:
    """A model with one part of this class."""
    part = {**vars(broken), "OnOneRank": OnOneRank}[name]
    setup = Setup(ep=ep, balance="none")
    if group == "overlap":
        return setup, make_model(setup.with_(schedule=part))
    if group == "router":
        with mock.patch.dict(build_tiny.ROUTERS, own=part):
            return setup, make_model(setup.with_(router="own"))
    tables = {"balance": "BALANCES", "dispatcher": "DISPATCHERS", "fusion": "FUSIONS"}
    made = (lambda: part(**arguments)) if group == "balance" else part
    with mock.patch.dict(getattr(build_tiny, tables[group]), own=made):
        return setup, make_model(setup.with_(**{group: "own"}))


def one_step(rank: int, world: int, setup: Setup, model: Any, *, looked: bool) -> tuple[float, Any]:
    step = make_step(setup, model, world)
    optimizer = make_optimizer(setup, step.params)
    look = FirstStep(step) if looked else None
    if look is not None:
        look.__enter__()
    try:
        step.attempt(local_batch(setup, 0, rank, world))
        report = step.check()
        step.commit(report, optimizer_step=optimizer.step, max_norm=0.5)
    finally:
        if look is not None:
            look.__exit__(None, None, None)
        step.reduction.close()
    return report.loss, (report.bytes_on_wire, report.counts.tolist())


class NeverAttempts(NoGraph):
    def run(self, attempt: Any, **_: Any) -> None:
        pass


class NeverUpdates(NoGraph):
    def update(self, update: Any) -> None:
        pass


class SumsNothing(Replicate):
    def last_micro_batch(self) -> Any:
        return nullcontext()


class KeepsItsPromise(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["params"][0].data.view(-1)[0] = self.weight()

    def weight(self) -> float:
        return 0.5


class LeavesNan(KeepsItsPromise):
    def weight(self) -> float:
        return float("nan")


class DriftsApart(KeepsItsPromise):
    def weight(self) -> float:
        return float(torch.distributed.get_rank())


def step_beside(rank: int, world: int, part: type) -> None:
    """A step of the shipped parts but for this one."""
    setup = Setup(ep=1)
    reduction = part(bucket_mb=0.05) if issubclass(part, Replicate) else build_tiny.make_reduction(setup)
    graph = part() if issubclass(part, NoGraph) else NoGraph()
    model = make_model(setup)
    with mock.patch.object(build_tiny, "make_reduction", return_value=reduction):
        step = make_step(setup, model, world)
    optimizer = (part if issubclass(part, KeepsItsPromise) else torch.optim.SGD)(step.params, lr=0.1)
    batch = local_batch(setup, 0, rank, world)
    try:
        with FirstStep(step, graph=graph, optimizer=optimizer) as look:
            step.prepare(batch)
            graph.run(lambda: step.run(batch), key=None, ready=True, rehearsal=None)
            look.attempted()
            report = step.check()
            step.commit(report, optimizer_step=lambda: graph.update(optimizer.step))
            look.committed()
    finally:
        step.reduction.close()


def refused_beside(rank: int, world: int) -> dict[str, str]:
    said = {}
    for name in BESIDE:
        try:
            step_beside(rank, world, globals()[name])
            said[name] = "nothing"
        except ConfigError as error:
            said[name] = str(error)
    step_beside(rank, world, KeepsItsPromise)
    return said


def test_what_a_step_has_beside_its_model_is_named_on_every_rank() -> None:
    one, other = ranks(2).run(refused_beside, limit_s=110)
    assert one == other
    for name, (group, sentence) in BESIDE.items():
        assert one[name].startswith(f"{group}={__name__}.{name}: in the first step "), one[name]
        assert re.search(sentence, one[name]), one[name]


def refused(rank: int, world: int) -> dict[str, str]:
    """What is said of every class."""
    said = {}
    for name, (group, arguments, _) in BROKEN.items():
        setup, model = with_part(name, group, arguments)
        try:
            one_step(rank, world, setup, model, looked=True)
            said[name] = "nothing"
        except ConfigError as error:
            said[name] = str(error)
    return said


@cache
def sentences() -> list[dict[str, str]]:
    return ranks(2).run(refused, limit_s=110)


@pytest.mark.parametrize("name", BROKEN)
def test_the_first_step_names_what_is_wrong_on_every_rank(name: str) -> None:
    group, _, sentence = BROKEN[name]
    one, other = (said[name] for said in sentences())
    module = __name__ if name == "OnOneRank" else broken.__name__
    assert one == other and "\n" not in one
    assert one.startswith(f"{group}={module}.{name}: in the first step ") and re.search(sentence, one), one
    assert f"run scripts/check_part.py {module}.{name}" in one


def kept(rank: int, world: int, name: str) -> Any:
    """A step that is looked at, one that is not, and what stands in the model afterwards."""
    group, arguments = KEEP[name]
    found = []
    for looked in (True, False):
        setup, model = with_part(name, group, arguments)
        before = [
            (block.schedule, block.moe.parts, block.moe.experts.fusion) for block in list(model.blocks)[1:]
        ]
        numbers = one_step(rank, world, setup, model, looked=looked)
        after = [
            (block.schedule, block.moe.parts, block.moe.experts.fusion) for block in list(model.blocks)[1:]
        ]
        assert all(a is b for old, new in zip(before, after) for a, b in zip(old, new)), "a proxy stayed"
        found.append((numbers, {n: full(p) for n, p in model.named_parameters()}))
    (one, params), (other, expected) = found
    assert one == other and all(torch.equal(params[n], expected[n]) for n in expected)


@pytest.mark.parametrize("name", KEEP)
def test_a_part_that_keeps_its_promises_gives_the_same_bits_and_counts_when_it_is_looked_at(
    name: str,
) -> None:
    ranks(2).run(kept, name=name)


def covered(rank: int, world: int) -> list[str]:
    setup = Setup(ep=2)
    model = make_model(setup)
    step = make_step(setup, model, world)
    with FirstStep(step):
        unit: Any = model.blocks[1]
        parts = unit.moe.parts
        own = [parts.router, parts.balance, parts.dispatcher, unit.moe.experts.fusion, unit.schedule]
    step.reduction.close()
    return [type(part).__name__ for part in own]


def test_shipped_parts_are_not_looked_at() -> None:
    assert ranks(2).run(covered)[0] == [
        "SoftmaxRouter",
        "AuxLoss",
        "AllToAllDispatcher",
        "GroupedExperts",
        NoOverlap.__name__,
    ]
