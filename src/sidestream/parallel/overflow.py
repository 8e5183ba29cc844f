"""What happens when a static receive budget was too small for a step.

    begin     counters to zero; this rank's random numbers are kept
    attempt   forward, backward, reduction; what does not fit is dropped, but counted
    check     a flag rides on the reduction that happens anyway
    resolve   no overflow, or `drop`: commit.  `error`: every rank raises.
              `replay`: grow to the largest need of any rank, restore the random numbers, attempt the same again

Nothing lasting changes before the commit, so after a replay losses and parameters are those of a run whose budget
was large enough from the start, bit for bit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.dispatch.base import Dispatcher
from sidestream.parallel.mesh import Parallel

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class OverflowCounts:
    """What a run's budget went through.

    Attributes:
        events: Attempts of training steps in which some rank needed more rows than its budget.
        replays: How many of these attempts were repeated.
        dropped: Routes that training lost (`on_overflow=drop`): those of the attempts that stand.
    """

    events: int = 0
    replays: int = 0
    dropped: int = 0


class BudgetKeeper:
    """Watches the static budget of one dispatcher on one rank; idle for an eager one.

    Args:
        dispatcher: Wired.
        parallel: Groups.
        device: Where an attempt draws its random numbers.
        mean_rows: Rows per rank at perfect balance, `max_tokens x top_k`: a factor is a budget over this.
    """

    def __init__(
        self, dispatcher: Dispatcher, parallel: Parallel, *, device: torch.device, mean_rows: int
    ) -> None:
        self.dispatcher, self.parallel, self.device, self.mean_rows = dispatcher, parallel, device, mean_rows
        self.mode = getattr(dispatcher, "on_overflow", "replay")
        self.group = getattr(dispatcher, "config_group", "dispatcher")
        self.active = dispatcher.needed() is not None
        self.counts = OverflowCounts()
        self._rng: list[Tensor] = []
        needed = dispatcher.needed()
        self._peak = None if needed is None else torch.zeros_like(needed)
        self._rehearsed = None if needed is None else torch.zeros_like(needed)

    def begin(self) -> None:
        """Before an attempt."""
        if not self.active:
            return
        self.dispatcher.reset_needed()
        assert self._rehearsed is not None
        self._rehearsed.zero_()
        self._rng = [torch.get_rng_state()]
        if self.device.type == "cuda":
            self._rng.append(torch.cuda.get_rng_state(self.device))

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Routes that are dropped inside come again in the same attempt; they count there."""
        before = self.dispatcher.dropped()
        before = None if before is None else before.clone()
        yield
        after = self.dispatcher.dropped()
        if self._rehearsed is not None and before is not None and after is not None:
            self._rehearsed += after - before

    def flags(self) -> Tensor:
        """`[2]` fp64 on the device: layers of this rank that overflowed, routes that were dropped; no host read."""
        needed, dropped = self.dispatcher.needed(), self.dispatcher.dropped()
        assert needed is not None and dropped is not None
        assert self._peak is not None and self._rehearsed is not None
        torch.maximum(self._peak, needed, out=self._peak)
        return torch.stack([(needed > self._budget).sum(), (dropped - self._rehearsed).sum()]).double()

    def resolve(self, *, overflowed: int, dropped: int, trains: bool = True) -> bool:
        """Decide after the flags were added up over all ranks; equal on all ranks, collective after an overflow.

        Args:
            overflowed, dropped: The sums.
            trains: It was an attempt of a training step. Nothing else is counted.

        Returns:
            True if the attempt stands; False if it must be repeated, for which everything is ready.

        Raises:
            RuntimeError: On every rank, with `on_overflow=error`.
        """
        if not overflowed:
            return True
        self.counts.events += trains
        if self.mode == "drop":
            self.counts.dropped += dropped if trains else 0
            return True
        rank, layer, needed = self._worst()
        if self.mode == "error":
            raise RuntimeError(
                f"{self.group}.on_overflow=error: rank {rank} needed {needed} rows in MoE layer {layer}, its budget is "
                f"{self._budget}; set {self.group}.capacity_factor={self.factor(needed)} or "
                f"{self.group}.on_overflow=replay"
            )
        before = self._budget
        self.dispatcher.resize(needed)
        self.counts.replays += trains
        torch.set_rng_state(self._rng[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self._rng[1], self.device)
        if dist.get_rank() == 0:
            log.warning(
                "receive budget: rank %d needed %d rows in MoE layer %d; grown from %d to %d, %s repeated. "
                "%s.capacity_factor=%s from the start saves this",
                rank,
                needed,
                layer,
                before,
                self._budget,
                "step" if trains else "validation batch",
                self.group,
                self.factor(self._budget),
            )
        return False

    def guard(self, run: Callable[[], T]) -> T:
        """Run something that is no training step, such as a validation batch, until nothing overflows. Collective.

        `run` must not keep results of its own before it returns.
        """
        if not self.active:
            return run()
        while True:
            self.begin()
            value = run()
            flags = self.flags()
            if self.parallel.world_size > 1:
                dist.all_reduce(flags, group=self.parallel.control)
            overflowed, dropped = (int(number) for number in flags.tolist())
            if self.resolve(overflowed=overflowed, dropped=dropped, trains=False):
                return value

    @property
    def _configured(self) -> float | None:
        return getattr(self.dispatcher, "capacity_factor", None)

    @property
    def _budget(self) -> int:
        assert self.dispatcher.budget is not None
        return self.dispatcher.budget

    def _worst(self) -> tuple[int, int, int]:
        """Rank, layer and rows of the largest need. Collective."""
        needed = self.dispatcher.needed()
        assert needed is not None
        gathered = [torch.empty_like(needed) for _ in range(self.parallel.world_size)]
        if self.parallel.world_size > 1:
            dist.all_gather(gathered, needed, group=self.parallel.control)
        else:
            gathered = [needed]
        table = torch.stack(gathered).tolist()
        return max(
            ((rank, layer, rows) for rank, row in enumerate(table) for layer, rows in enumerate(row)),
            key=lambda entry: entry[2],
        )

    def factor(self, rows: int) -> float:
        """The capacity factor that gives `rows`, rounded up to 0.01."""
        return math.ceil(100 * rows / self.mean_rows) / 100

    def state(self) -> dict[str, Any] | None:
        """For a checkpoint: plain types. Collective."""
        if not self.active:
            return None
        known = {"budget": self._budget, "mean_rows": self.mean_rows, "peak": self.peak()}
        return {**known, **vars(self.counts), "capacity_factor": self._configured}

    def load(self, state: dict[str, Any] | None) -> None:
        """Go on with the grown budget of a checkpoint; with another number of ranks, with the same factor.

        A budget that does not grow, and one that was configured anew, is the one that is configured.
        """
        if not self.active or state is None:
            return
        if self.mode == "replay" and state.get("capacity_factor", self._configured) == self._configured:
            rows = -(-state["budget"] * self.mean_rows // state["mean_rows"])
            self.dispatcher.resize(max(self._budget, rows))
        self.counts = OverflowCounts(**{name: state[name] for name in vars(self.counts)})
        assert self._peak is not None
        self._peak.fill_(-(-state["peak"] * self.mean_rows // state["mean_rows"]))

    def peak(self) -> int:
        """Most rows that any rank needed in any layer so far. Collective, one host read."""
        assert self._peak is not None
        peak = self._peak.max() if self._peak.numel() else self._peak.sum()
        if self.parallel.world_size > 1:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=self.parallel.control)
        return int(peak)

    def result(self) -> dict[str, Any]:
        """The entry `overflow` of result.json; empty for an eager dispatcher. Collective."""
        if not self.active:
            return {}
        return {
            **vars(self.counts),
            "budget": self._budget,
            "recommended_factor": self.factor(max(1, self.peak())),
        }
