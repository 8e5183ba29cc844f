"""The first step of a run looks at what the user's own parts return, and names the class that breaks its protocol.

    with FirstStep(step, ...) as look: router, balance, dispatcher, fusion and schedule stand behind proxies
        ...attempts...
        look.attempted()               the graph has made one, and the strategy has summed the gradients
        ...check, commit...
        look.committed()               the optimizer has stepped, to the same finite weights on every rank
                                       the parts themselves again: later steps pay nothing

Each part is looked at once per layer, and all ranks look at the same moment: what one of them finds ends the run on
every rank with one line. Shipped parts have tests instead. `scripts/check_part.py` tries far more on a part. What is
asked on the host (the schedule of the rate, the link, the data) is looked at in `answers.py`.

Legend: T tokens, K routes per token, H features, E experts, L local experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, zeros_like
from torch.optim import Optimizer

from sidestream import cli
from sidestream.config.errors import ConfigError
from sidestream.conformance import rows
from sidestream.conformance.answers import class_of, is_own, is_own_optimizer
from sidestream.conformance.command import KINDS
from sidestream.conformance.values import (
    decision_problem,
    not_finite,
    observed_problem,
    output_problem,
    received_problem,
    scalar_problem,
    tensor_problem,
)
from sidestream.data.batch import Batch
from sidestream.dispatch.base import Routing
from sidestream.exchange.ops import Channel
from sidestream.fusion.base import resolve_alignment
from sidestream.graph.base import StepRunner
from sidestream.model.block import MoEUnit
from sidestream.model.moe import MoE
from sidestream.parallel.agree import differing
from sidestream.parallel.reduction import local
from sidestream.parallel.step import TrainingStep


class FirstStep:
    """Puts proxies in front of the user's own parts while it is entered.

    Args:
        step: Of this rank; its model's parts are looked at, and its reduction.
        graph: Makes the attempts.
        optimizer: Steps in the commit.
    """

    def __init__(
        self, step: TrainingStep, *, graph: StepRunner | None = None, optimizer: Optimizer | None = None
    ) -> None:
        self.step, self.model = step, step.model
        self.graph, self.optimizer = graph, optimizer
        self._attempts = self._updates = 0
        self._put_back: list[Callable[[], None]] = []
        self._looked: set[tuple[str, int]] = set()
        self.decided: dict[int, int] = {}

    def __enter__(self) -> FirstStep:
        units = [block for block in self.model.blocks if isinstance(block, MoEUnit)]
        for layer, unit in enumerate(units):
            self._cover(unit, layer)
            if is_own(unit.schedule):
                self._put(unit, "schedule", _Schedule(self, unit.schedule, layer))
        if is_own(self.model.parts.balance):
            balance: Any = _Balance(self, self.model.parts.balance, -1)
            self._put(self.model, "parts", replace(self.model.parts, balance=balance))
        if self.graph is not None and is_own(self.graph):
            self._put(self.step, "run", self._counted(self.step.run))
            assert self.optimizer is not None
            self._put_back.append(self.optimizer.register_step_post_hook(self._stepped).remove)
        return self

    def _counted(self, run: Callable[[Batch], None]) -> Callable[[Batch], None]:
        def counted(batch: Batch) -> None:
            self._attempts += 1
            run(batch)

        return counted

    def _stepped(self, *_: Any) -> None:
        self._updates += 1

    def attempted(self) -> None:
        """After the attempts. Collective.

        Raises:
            ConfigError: On every rank: the graph made none, or gradients differ that the strategy should have summed.
        """
        if self.graph is not None and is_own(self.graph):
            self.judge(
                "graph", self.graph, None if self._attempts else "run does not call the attempt", layer=-1
            )
        reduction: Any = self.step.reduction
        if is_own(reduction) and reduction.holds_replicas:
            named = self.model.named_parameters()
            gradients = {name: zeros_like(p) if p.grad is None else p.grad for name, p in named}
            self._judge_equal("strategy", reduction, "the gradient", gradients)

    def committed(self) -> None:
        """After the commit. Collective.

        Raises:
            ConfigError: On every rank: the optimizer was not called, or left weights that cannot be trained on.
        """
        if self.graph is not None and is_own(self.graph):
            self.judge(
                "graph", self.graph, None if self._updates else "update does not call the update", layer=-1
            )
        optimizer: Any = self.optimizer
        if optimizer is None or not is_own_optimizer(optimizer):
            return
        weights = dict(self.model.named_parameters())
        wrong = (not_finite(f"{name} after its step", local(p.detach())) for name, p in weights.items())
        self.judge("optimizer", optimizer, next(filter(None, wrong), None), layer=-1)
        if self.step.reduction.holds_replicas:
            self._judge_equal("optimizer", optimizer, "the weight", weights)

    def _judge_equal(self, key: str, part: Any, what: str, tensors: Mapping[str, Tensor]) -> None:
        found = differing(tensors, self.step.parallel)
        problem = f"{what} of {found[0]} differs between ranks that must hold the same" if found else None
        self.judge(key, part, problem, layer=-1)

    def _cover(self, unit: MoEUnit, layer: int) -> None:
        parts, moe = unit.moe.parts, unit.moe
        changed: dict[str, Any] = {}
        # A schedule is held to what was decided, whoever decided it.
        if is_own(parts.router) or is_own(unit.schedule):
            changed["router"] = _Router(self, parts.router, layer)
        if is_own(parts.balance):
            changed["balance"] = _Balance(self, parts.balance, layer)
        if parts.fused is None and is_own(parts.dispatcher):
            changed["dispatcher"] = _Dispatcher(self, parts.dispatcher, layer, moe)
        if parts.fused is not None and is_own(parts.fused):
            changed["fused"] = _Fused(self, parts.fused, layer)
        elif is_own(moe.experts.fusion):
            self._put(moe.experts, "fusion", _Fusion(self, moe.experts.fusion, layer))
        if changed:
            self._put(moe, "parts", replace(parts, **changed))

    def _put(self, owner: Any, name: str, value: Any) -> None:
        before = getattr(owner, name)
        self._put_back.append(lambda: setattr(owner, name, before))
        setattr(owner, name, value)

    def __exit__(self, *error: object) -> None:
        while self._put_back:
            self._put_back.pop()()

    def first(self, what: str, layer: int) -> bool:
        """True once for each kind of look and layer."""
        new = (what, layer) not in self._looked
        self._looked.add((what, layer))
        return new

    def judge(self, key: str, part: Any, problem: str | None, *, layer: int) -> None:
        """Tell the other ranks; collective.

        Raises:
            ConfigError: On every rank, if one of them found a problem.
        """
        parallel = self.step.parallel
        found: list[str | None] = [problem]
        if parallel.world_size > 1:
            found = [None] * parallel.world_size
            dist.all_gather_object(found, problem, group=parallel.control)
        rank = next((rank for rank, said in enumerate(found) if said is not None), None)
        if rank is None:
            return
        where = f" (MoE layer {layer}, rank {rank})" if layer >= 0 else f" (rank {rank})"
        name = class_of(part)
        raise ConfigError(
            key,
            name,
            f"in the first step {found[rank]}{where}",
            expected="what its protocol promises, see docs/architecture.md",
            fix=f"run {cli.spelled('scripts/check_part.py')} {name}, which tries more"
            if key in KINDS
            else "correct the class",
        )


class _Proxy:
    """Everything of a part but what is looked at."""

    def __init__(self, look: FirstStep, part: Any, layer: int) -> None:
        self._look, self._part, self._layer = look, part, layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def _judge(self, key: str, problem: str | None) -> None:
        self._look.judge(key, self._part, problem, layer=self._layer)


class _Router(_Proxy):
    def __call__(self, logits: Tensor, *, valid: Tensor | None = None, **options: Any) -> Any:
        decision = self._part(logits, valid=valid, **options)
        if is_own(self._part) and self._look.first("router", self._layer):
            top_k = self._part.top_k
            self._judge("router", decision_problem(decision, logits=logits, top_k=top_k, valid=valid))
        decided = self._look.decided
        decided[self._layer] = decided.get(self._layer, 0) + int(decision.counts.sum())
        return decision


class _Balance(_Proxy):
    def loss(self, *args: Any, **options: Any) -> Any:
        return self._looked_at("loss", self._part.loss(*args, **options))

    def global_loss(self, *args: Any, **options: Any) -> Any:
        return self._looked_at("global_loss", self._part.global_loss(*args, **options))

    def _looked_at(self, what: str, value: Any) -> Any:
        if self._look.first(f"balance.{what}", self._layer):
            self._judge("balance", None if value is None else scalar_problem(f"what {what} returns", value))
        return value

    def observe(self, decision: Any, bias: Tensor) -> Any:
        observed = self._part.observe(decision, bias)
        if self._look.first("balance.observe", self._layer):
            self._judge("balance", observed_problem(observed, experts=bias.numel()))
        return observed

    def commit(self, bias: Tensor, counts: Tensor, observed: Tensor | None = None) -> None:
        told = counts.clone()
        self._part.commit(bias, counts, observed)
        problem = not_finite("the selection bias after commit", bias)
        if problem is None and not torch.equal(told, counts):
            problem = "commit changes the counts that it is given"
        self._judge("balance", problem)


class _Waiting(_Proxy):
    """A transfer under way, whose result is looked at."""

    def __init__(
        self, look: FirstStep, part: Any, layer: int, pending: Any, judge: Callable[[Any], None]
    ) -> None:
        super().__init__(look, part, layer)
        self._pending, self._judge_value = pending, judge

    def wait(self) -> Any:
        value = self._pending.wait()
        self._judge_value(value)
        return value


class _Dispatcher(_Proxy):
    def __init__(self, look: FirstStep, part: Any, layer: int, moe: MoE) -> None:
        super().__init__(look, part, layer)
        self._moe = moe
        self._shapes: dict[int, torch.Size] = {}  # of the plans' tokens

    def plan(self, routing: Routing, *, layer: int = 0) -> Any:
        # One dispatcher serves all layers.
        if self._look.first("dispatcher.rows", 0):
            self._judge("dispatcher", self._misplaced(routing, layer))
        return self._part.plan(routing, layer=layer)

    def dispatch(self, x: Tensor, plan: Any) -> Any:
        pending = self._part.dispatch(x, plan)
        if not self._look.first("dispatcher.dispatch", self._layer):
            return pending
        self._shapes[id(plan)] = x.shape
        return _Waiting(self._look, self._part, self._layer, pending, lambda got: self._received(got, x))

    def _received(self, received: Any, x: Tensor) -> None:
        fusion = self._moe.experts.fusion
        first, last = self._moe.parts.expert_range
        problem = received_problem(
            received,
            hidden=x.shape[1],
            num_local=last - first,
            alignment=resolve_alignment(fusion.alignment, dtype=x.dtype, device_type=x.device.type),
            dtype=x.dtype,
        )
        self._judge("dispatcher", problem)

    def combine(self, rows_SH: Tensor, plan: Any) -> Any:
        pending = self._part.combine(rows_SH, plan)
        if not self._look.first("dispatcher.combine", self._layer):
            return pending

        shape = self._shapes.get(id(plan))

        def combined(value: Any) -> None:
            problem = tensor_problem("what combine gives", value, shape=shape, dtype=rows_SH.dtype)
            self._judge("dispatcher", problem)

        return _Waiting(self._look, self._part, self._layer, pending, combined)

    def _misplaced(self, routing: Routing, layer: int) -> str | None:
        """Send rows of known numbers the same ways, and compare. Collective."""
        step, moe = self._look.step, self._moe
        group = step.parallel.ep_group if step.parallel.ep_size > 1 else None
        ids, experts = routing.expert_ids, moe.gate.shape[0]
        device = ids.device
        dtype = moe.experts.w_gate_up.dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        draw = torch.Generator().manual_seed(rows.place(group)[0])
        shape = (ids.shape[0], moe.gate.shape[1])
        x, gradient = (torch.randn(shape, generator=draw).to(device, dtype) for _ in range(2))
        given = rows.Given(x, gradient, replace(routing, weights=routing.weights.detach()))
        scales = rows.make_scales(experts, shape[1], device, seed=0)
        with step.uncounted(), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            found = rows.found_by(self._part, given, scales, group=group, layer=layer)
        if found.dropped:
            return None  # which routes a budget loses is the dispatcher's choice
        right = rows.wanted(given, scales, ids=ids, group=group)
        # A dispatcher may send less than it was given, such as 8 bits per value.
        return rows.too_far(rows.distance(found, right, group=group), "mxfp8")


class _Fused(_Proxy):
    def start(self, x: Tensor, *args: Any, **options: Any) -> Any:
        pending = self._part.start(x, *args, **options)
        if not self._look.first("fused", self._layer):
            return pending
        return _Waiting(
            self._look,
            self._part,
            self._layer,
            pending,
            lambda y: self._judge("fusion", output_problem("its result", y, like=x)),
        )


class _Fusion(_Proxy):
    def __call__(self, received: Any, *args: Any) -> Any:
        out = self._part(received, *args)
        if self._look.first("fusion", self._layer):
            end = int(received.offsets[-1])
            self._judge("fusion", output_problem("its result", out, like=received.rows, rows=end))
        return out


class _Schedule(_Proxy):
    def __call__(self, unit: Any, h: Tensor, context: Any) -> Any:
        if not self._look.first("schedule", self._layer):
            return self._part(unit, h, context)
        counts = self._look.model.ledger.counts[self._layer]
        before = int(counts.sum())
        self._look.decided[self._layer] = 0
        out = self._part(unit, h, context)
        problem = output_problem("its result", out, like=h)
        reported, decided = int(counts.sum()) - before, self._look.decided[self._layer]
        if problem is None and unit.training and reported != decided:
            problem = (
                f"{decided} routes were decided and {reported} reported: call unit.moe.report once for each"
            )
        channel = getattr(unit.moe.parts.dispatcher, "channel", None)
        if problem is None and isinstance(channel, Channel) and channel.pending:
            problem = f"{channel.pending} transfers that it started are not finished"
        self._judge("overlap", problem)
        return out
