"""The picture of a prediction: what each schedule gains, by expert-parallel size and by the share of communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sidestream.model.account import forward_flops
from sidestream.predict.cluster import Cluster
from sidestream.predict.job import Job
from sidestream.predict.schedules import Schedule
from sidestream.predict.step import schedule_of, unit_of, unit_passes
from sidestream.report.charts import NEUTRAL, look, new_figure, styled

SHARES = tuple(share / 100 for share in range(5, 76, 5))
NAMES = ("shared_expert", "chunked", "two_batch", "shortcut")
SLOWEST, FASTEST = 1e-4, 1e4  # of the links, in what they are


@dataclass(frozen=True)
class Line:
    """One schedule: speed-up of a MoE unit over the same without overlap, at each place."""

    name: str
    at: tuple[float, ...]
    speedup: tuple[float, ...]


def schedules_of(job: Job) -> Iterator[Schedule]:
    """Those that the model has parts for."""
    delay = job.schedule.delay_wgrad
    if job.shape.num_shared_experts:
        yield Schedule("shared_expert", delay_wgrad=delay)
    yield Schedule("chunked", parts=max(2, job.schedule.parts), delay_wgrad=delay)
    if job.micro_batch_size > 1:
        yield Schedule("two_batch", parts=2, delay_wgrad=delay)
    tap = job.schedule.tap if job.schedule.name == "shortcut" else "auto"
    yield Schedule("shortcut", tap=tap, delay_wgrad=delay)


def expert_parallel_sizes(job: Job) -> list[int]:
    """Divisors of the ranks and of the experts, from 2 on."""
    ranks, experts = job.data_parallel_size, job.routes.num_experts
    return [n for n in range(2, ranks + 1) if ranks % n == 0 and experts % n == 0]


def by_size(job: Job, cluster: Cluster) -> list[Line]:
    """Over the expert-parallel size."""
    sizes = expert_parallel_sizes(job)
    return [
        Line(
            schedule.name,
            tuple(map(float, sizes)),
            tuple(_speedup(replace(job, expert_parallel_size=n, schedule=schedule), cluster) for n in sizes),
        )
        for schedule in schedules_of(job)
    ]


def by_share(job: Job, cluster: Cluster, shares: Sequence[float] = SHARES) -> list[Line]:
    """Over the share of communication in the serial time: the links are made slower or faster until it is reached."""
    lines = []
    for schedule in schedules_of(job):
        chosen = replace(job, schedule=schedule)
        found = [(share, cluster_with_share(chosen, cluster, share)) for share in shares]
        reached = [(share, machine) for share, machine in found if machine is not None]
        lines.append(
            Line(
                schedule.name,
                tuple(share for share, _ in reached),
                tuple(_speedup(chosen, machine) for _, machine in reached),
            )
        )
    return lines


def _speedup(job: Job, cluster: Cluster) -> float:
    """Seconds of the same blocks without overlap, over those with it, of the last MoE block."""
    block = job.shape.moe_blocks[-1]
    chosen = schedule_of(job, block)
    plain = unit_passes(job.with_schedule(Schedule("none")), cluster, block)
    without = sum(one.seconds for one in plain)
    if chosen.name == "shortcut" and chosen.tap != "pos1":
        flops = forward_flops(job.shape, top_k=job.routes.top_k, seq_length=job.seq_length)
        without += sum(
            part.total for part in unit_of(job.with_schedule(chosen), cluster, flops, block).before
        )
    return without / sum(one.seconds for one in unit_passes(job, cluster, block))


def _share(job: Job, cluster: Cluster) -> float:
    both = unit_passes(job, cluster, job.shape.moe_blocks[-1])
    return sum(one.communication for one in both) / sum(one.serial for one in both)


def cluster_with_share(job: Job, cluster: Cluster, share: float) -> Cluster | None:
    """The cluster with links so fast that communication is `share` of the serial time; None: latency alone is more."""
    low, high = SLOWEST, FASTEST  # the share falls as links get faster
    if not _share(job, _with_links(cluster, high)) <= share <= _share(job, _with_links(cluster, low)):
        return None
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _share(job, _with_links(cluster, middle)) > share else (low, middle)
    return _with_links(cluster, high)


def _with_links(cluster: Cluster, factor: float) -> Cluster:
    slow = None if cluster.slow_link is None else cluster.slow_link * factor
    return replace(cluster, fast_link=cluster.fast_link * factor, slow_link=slow)


@styled
def draw(job: Job, cluster: Cluster, path: Path, *, title: str) -> None:
    """Write the picture; its file appears whole."""
    from matplotlib.ticker import PercentFormatter

    figure = new_figure(10, 4.4, dpi=130)
    left, right = figure.subplots(1, 2, sharey=True)
    for axis, lines in ((left, by_size(job, cluster)), (right, by_share(job, cluster))):
        axis.axhline(1, color=NEUTRAL, linewidth=1)
        for line in lines:
            axis.plot(line.at, line.speedup, markersize=4, label=line.name, **look(NAMES.index(line.name)))
        axis.grid(alpha=0.25)
    sizes = expert_parallel_sizes(job)
    if sizes:
        left.set_xscale("log", base=2)
        left.set_xticks(sizes, [str(size) for size in sizes])
        left.minorticks_off()
        left.axvline(job.expert_parallel_size, color="#cccccc", linewidth=6, alpha=0.5, zorder=0)
    left.set_xlabel("expert_parallel_size")
    left.set_ylabel("speed-up of a MoE unit over no overlap, predicted")
    right.set_xlabel("share of dispatch and combine in the serial time")
    right.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    actual = _share(replace(job, schedule=Schedule("none")), cluster)
    right.axvline(actual, color="#cccccc", linewidth=6, alpha=0.5, zorder=0)
    left.legend(loc="upper left")
    figure.suptitle(title, fontsize=10)
    told = "Grey: as asked. A bound of each schedule, less what transfers take from compute."
    figure.supxlabel(told, fontsize=8, color="#555555")
    temporary = path.with_name(path.name + ".part.png")
    figure.savefig(temporary)
    temporary.replace(path)
