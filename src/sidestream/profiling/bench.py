"""Measures overlap: compute alone, communication alone, serial, overlapped, of one unit or of a whole step.

    bench = Bench(work)
    bench.record()                       what travels, once
    bench.choose_rate(0.3)               optional: a throttled link that makes communication 30 % of the serial time
    bench.fall_asleep()                  optional: parts sleep as long as they took
    bench.search_slot(parallel)          where the schedule looks for a slot
    measured = bench.measure(rounds=20, warmup=3)
    measured.report("both")              E_hide, E_comm, bound, ...

All four run in every round, in an order that changes from round to round, a barrier before each pass. A time is that
of the slowest rank; figures are of medians over rounds. Serial and overlapped are the same code on the same weights,
inputs and random numbers. Everything here is collective.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sidestream.config.errors import ConfigError
from sidestream.conformance.serial import SerialLog
from sidestream.exchange.link import ThrottledLink
from sidestream.exchange.ops import Span
from sidestream.overlap.none import NoOverlap
from sidestream.overlap.slots import MEASURED_STEPS
from sidestream.parallel.mesh import Parallel
from sidestream.profiling.bound import Event, hideable
from sidestream.profiling.exchange import Deliver, Exchange, RecordExchanges, Replay, channel_of
from sidestream.profiling.figures import OverlapReport, hidden_seconds, overlap_report
from sidestream.profiling.rounds import barrier, finish_device, median, time_rounds
from sidestream.profiling.spans import COMPUTE, WIRE, Bar, PassTrace, median_events
from sidestream.profiling.trace import ASLEEP, Key, Listening, Tracer
from sidestream.profiling.work import Work, set_training

ARMS = ("compute", "communication", "serial", "overlapped")
SHOWN = ("serial", "overlapped")
BOTH = "both"
NOISE_S = 50e-6  # of a host's clock, a barrier and a wait
ROUNDS_OF_LENGTHS = 5


@dataclass(frozen=True)
class Measured:
    """The figures of all rounds. Equal on all ranks but for `traces`.

    Attributes:
        passes: Their names.
        seconds: `[rounds, 4, passes]` float64, of the slowest rank, in the order of `ARMS`.
        busy: `[rounds, passes]` float64, seconds computed in the overlapped run, of the slowest rank; None on a GPU,
            where spans say when the host issued work.
        hideable: Seconds that the schedule can hide at best, per pass; None on a GPU.
        traces: `serial` and `overlapped` -> the passes of this rank in the round that `shown_round` names.
        shown_round: The one whose times are closest to the medians.
    """

    passes: tuple[str, ...]
    seconds: Tensor
    busy: Tensor | None
    hideable: tuple[float, ...] | None
    traces: dict[str, list[PassTrace]]
    shown_round: int

    def rounds_of(self, arm: str, name: str = BOTH) -> list[float]:
        """Seconds of each round; `both` is the sum of the passes."""
        of_arm = self.seconds[:, ARMS.index(arm)]
        return (of_arm.sum(dim=1) if name == BOTH else of_arm[:, self.passes.index(name)]).tolist()

    def milliseconds(self, arm: str, name: str = BOTH) -> list[float]:
        """Milliseconds of each round, as they are written to files: every figure of them comes from these."""
        return [round(1e3 * value, 4) for value in self.rounds_of(arm, name)]

    def median(self, arm: str, name: str = BOTH) -> float:
        return statistics.median(self.rounds_of(arm, name))

    def report(self, name: str = BOTH, *, t_step: float | None = None) -> OverlapReport:
        """The report of a pass, or of all passes together."""
        which = list(range(len(self.passes))) if name == BOTH else [self.passes.index(name)]
        compute, communication, serial, overlapped = (self.median(arm, name) for arm in ARMS)
        return overlap_report(
            compute,
            communication,
            serial,
            overlapped,
            t_step,
            hideable=None if self.hideable is None else sum(self.hideable[index] for index in which),
            busy=None if self.busy is None else float(median(self.busy[:, which].sum(dim=1))),
            noise=NOISE_S,
        )

    def e_hide_rounds(self, name: str = BOTH) -> list[float]:
        """E_hide of each round by itself: its spread says how sure the figure is."""
        rounds = zip(*(self.rounds_of(arm, name) for arm in ARMS))
        return [(s - o) / min(c, m) for c, m, s, o in rounds if min(c, m) > NOISE_S]

    def bars(self, arm: str) -> list[list[Bar]]:
        """The parts of this rank's timeline, per pass."""
        return [trace.bars() for trace in self.traces[arm]]

    def hidden_seconds(self, arm: str = "overlapped") -> tuple[float, float]:
        """By the recorded spans of this rank, see `overlap_report.hidden_seconds`; all passes."""
        hidden = travelling = 0.0
        for bars in self.bars(arm):
            lanes: dict[str, list[tuple[float, float]]] = {COMPUTE: [], WIRE: []}
            for bar in bars:
                lanes[bar.lane].append((bar.begin, bar.end))
            of_pass = hidden_seconds(lanes[WIRE], lanes[COMPUTE])
            hidden, travelling = hidden + of_pass[0], travelling + of_pass[1]
        return hidden, travelling


class Bench:
    """Runs a piece of work in the four ways. Its parts report until `close`.

    Raises:
        ValueError: Nothing travels, see `channel_of`.
    """

    def __init__(self, work: Work) -> None:
        self.work, self.tracer = work, Tracer()
        self.channel = channel_of(work.model)
        self.schedule = work.model.schedule
        self.device = next(work.model.parameters()).device
        self._exchanges: list[Exchange] = []
        self._replay: Replay | None = None
        self._splits: list[int] = []  # number of the first transfer of each pass, and of none
        self._traces: list[PassTrace] = []
        self._listening = Listening(work.blocks, self.tracer)

    def close(self) -> None:
        self._listening.close()
        self.channel.deliver = self.channel.spans = None

    @property
    def overlaps(self) -> bool:
        """The schedule overlaps anything at all."""
        return not isinstance(self.schedule, NoOverlap)

    def run(self, arm: str) -> list[float]:
        """One run; seconds of this rank per pass. Its spans are in `self._traces` then."""
        self.schedule.enabled = arm == "overlapped"
        deliver = Deliver(self._exchanges) if arm == "compute" else None
        self.channel.deliver = deliver
        self._traces = []
        self.tracer.begin_run()
        for number, name in enumerate(self.work.passes):
            self.tracer.begin_pass()
            spans: list[Span] = []
            self.channel.spans = spans
            barrier()
            finish_device(self.device)
            begin = time.monotonic()
            if arm == "communication":
                assert self._replay is not None, "record first"
                self._replay.run(*self._splits[number : number + 2])
            else:
                self.work.run(name)
            finish_device(self.device)
            end = time.monotonic()
            parts, fences = tuple(self.tracer.parts), tuple(self.tracer.fences)
            self._traces.append(PassTrace(begin, end, parts, fences, tuple(spans)))
        assert deliver is None or deliver.finished, "a transfer of the recorded run was not asked for"
        self.channel.deliver = None
        return [trace.end - trace.begin for trace in self._traces]

    def record(self) -> None:
        """Take note of what travels in a serial run.

        Raises:
            ConfigError: It is not serial, so nothing could be compared with it.
        """
        self.schedule.enabled = False
        self.tracer.begin_run()
        self._splits = [0]
        with RecordExchanges() as recorder, SerialLog() as log:
            for name in self.work.passes:
                self.work.run(name)
                self._splits.append(len(recorder.exchanges))
        if (problem := log.problem()) is not None:
            raise ConfigError(
                "overlap",
                f"{type(self.schedule).__module__}.{type(self.schedule).__qualname__}",
                problem,
                expected="paths that wait where they start",
                fix="remove serial=False where the schedule makes its paths",
            )
        self._exchanges = recorder.exchanges
        self._replay = Replay(self.channel, self._exchanges)

    def compute_seconds(self, *, rounds: int = ROUNDS_OF_LENGTHS) -> float:
        """Compute alone, median over some rounds, slowest rank."""
        self.run("compute")
        return _slowest([statistics.median(sum(self.run("compute")) for _ in range(rounds))])[0]

    def choose_rate(self, share: float, *, rounds: int = ROUNDS_OF_LENGTHS) -> float:
        """Give the throttled link the rate at which communication is `share` of the serial time; return it in Gbit/s.

        The machine's own transport is not made faster by it: where that takes longer, the share is larger.
        """
        link = self.channel.link
        assert isinstance(link, ThrottledLink)
        wanted = self.compute_seconds(rounds=rounds) * share / (1 - share)
        latency = len(self._exchanges) * link.latency_s
        if latency >= wanted:
            raise ConfigError(
                "link.latency_us",
                1e6 * link.latency_s,
                f"{len(self._exchanges)} transfers have {1e3 * latency:.2f} ms of latency, and for measure.comm_share="
                f"{share} communication should take {1e3 * wanted:.2f} ms",
                expected="less latency",
                fix="link.latency_us=0",
            )
        self.run("serial")
        spans = [span for trace in self._traces for span in trace.spans]
        (most,) = _slowest([sum(max(span.sent_bytes, span.received_bytes) for span in spans)])
        gbps = most / (wanted - latency) * 8e-9
        self.channel.link = ThrottledLink(gbps=gbps, latency_us=1e6 * link.latency_s)
        return gbps

    def fall_asleep(
        self, lengths: Mapping[str, float] | None = None, *, rounds: int = ROUNDS_OF_LENGTHS
    ) -> None:
        """From now on parts sleep as long as they took, and give the results that they had.

        Args:
            lengths: Part -> seconds of each of its passes, instead of the measured ones.
            rounds: Of compute alone, in which lengths are measured.
        """
        lengths = lengths or {}
        self.tracer.recording = True
        self.run("serial")
        self.tracer.recording = False
        there = sorted({name for _, name, _ in self.tracer.recorded} & set(ASLEEP))
        if unknown := sorted(set(lengths) - set(there)):
            raise ConfigError(
                f"measure.sleep_ms.{unknown[0]}",
                1e3 * lengths[unknown[0]],
                "this schedule has no such part",
                expected=f"some of {', '.join(there)}",
                fix=f"measure.sleep_ms.{unknown[0]}=null",
            )
        taken: dict[tuple[Key, bool], list[float]] = defaultdict(list)
        for _ in range(rounds):
            self.run("compute")
            for part in (part for trace in self._traces for part in trace.parts):
                taken[part.key, part.backward].append(part.end - part.begin)
        for key, recorded in self.tracer.recorded.items():
            measured = [statistics.median(taken.get((key, backward), [0.0])) for backward in (False, True)]
            forward, backward = (lengths.get(key[1], seconds) for seconds in measured)
            recorded.seconds = (forward, backward)
        self.tracer.asleep = True

    def search_slot(self, parallel: Parallel) -> None:
        """Let a schedule that looks for the best slot do so, under the conditions that are measured."""
        slots = self.schedule.slots
        if slots is None:
            return
        self.schedule.enabled = True
        modes = [(module, module.training) for module in self.work.model.modules()]
        set_training(self.work.blocks, True)  # it looks at steps of training only
        for _ in range(MEASURED_STEPS):
            self.tracer.begin_run()
            self.work.model.ledger.begin_attempt()
            for name in self.work.passes:
                self.work.run(name)
            slots.end_step(parallel.control, torch.device(parallel.dense.device_type))
        self.work.model.ledger.begin_attempt()
        for module, training in modes:
            module.training = training

    def measure(self, *, rounds: int, warmup: int, seed: int = 0) -> Measured:
        """All four ways in every round."""
        passes = self.work.passes
        kept: dict[tuple[str, int], list[PassTrace]] = {}

        def measure(number: int, index: int) -> list[float]:
            times = self.run(ARMS[number])
            kept[ARMS[number], index - warmup] = self._traces
            return times

        seconds = time_rounds(len(ARMS), measure, parts=len(passes), rounds=rounds, warmup=warmup, seed=seed)
        totals = seconds[:, [ARMS.index(arm) for arm in SHOWN]].sum(dim=2)
        shown = int((totals - median(totals)).abs().sum(dim=1).argmin())
        traces = {arm: kept[arm, shown] for arm in SHOWN}
        if self.device.type != "cpu":
            return Measured(passes, seconds, None, None, traces, shown)
        busy = [[trace.busy for trace in kept["overlapped", index]] for index in range(rounds)]
        busy_slowest = torch.tensor(busy, dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(busy_slowest, op=dist.ReduceOp.MAX)
        bounds = [self._hideable(kept, number, rounds) for number in range(len(passes))]
        return Measured(passes, seconds, busy_slowest, tuple(bounds), traces, shown)

    def _hideable(self, kept: dict[tuple[str, int], list[PassTrace]], number: int, rounds: int) -> float:
        """Of one pass; every part as long as on the slowest rank."""
        if not self.overlaps:
            return 0.0
        events = median_events([kept["compute", index][number].events() for index in range(rounds)])
        alone = [
            [span.completed - span.issued for span in kept["communication", index][number].spans]
            for index in range(rounds)
        ]
        transfers = [statistics.median(column) for column in zip(*alone)]
        slowest = _slowest([*(event.seconds for event in events), *transfers])
        events = [
            Event(event.kind, event.name, event.backward, event.transfer, seconds)
            for event, seconds in zip(events, slowest)
        ]
        return hideable(events, slowest[len(events) :])


def _slowest(numbers: list[Any]) -> list[float]:
    """The largest of all ranks, place by place."""
    values = torch.tensor(numbers, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values.tolist()
