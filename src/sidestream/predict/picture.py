"""The picture of a prediction: what each schedule gains, by expert-parallel size and by the share of communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sidestream.model.account import forward_flops
from sidestream.predict.cluster import Cluster
from sidestream.predict.job import Job
from sidestream.predict.read import Asked
from sidestream.predict.step import unit_of, unit_passes
from sidestream.report.charts import NEUTRAL, look, new_figure, styled

SHARES = tuple(share / 100 for share in range(5, 76, 5))
SLOWEST, FASTEST = 1e-4, 1e4  # of the links, in what they are


@dataclass(frozen=True)
class Line:
    """One schedule: speed-up of a MoE unit over the same without overlap, at each place."""

    name: str
    at: tuple[float, ...]
    speedup: tuple[float, ...]


def expert_parallel_sizes(job: Job) -> list[int]:
    """Divisors of the ranks and of the experts, from 2 on."""
    ranks, experts = job.data_parallel_size, job.routes.num_experts
    return [n for n in range(2, ranks + 1) if ranks % n == 0 and experts % n == 0]


def by_size(asked: Asked) -> list[Line]:
    """Over the expert-parallel size."""
    sizes = expert_parallel_sizes(asked.job)
    return [
        Line(
            name,
            tuple(map(float, sizes)),
            tuple(_speedup(replace(job, expert_parallel_size=n), asked.cluster) for n in sizes),
        )
        for name, job in _under_each_schedule(asked)
    ]


def by_share(asked: Asked, shares: Sequence[float] = SHARES) -> list[Line]:
    """Over the share of communication in the serial time: the links are made slower or faster until it is reached."""
    lines = []
    for name, job in _under_each_schedule(asked):
        found = [(share, cluster_with_share(job, asked.cluster, share)) for share in shares]
        reached = [(share, machine) for share, machine in found if machine is not None]
        lines.append(
            Line(
                name,
                tuple(share for share, _ in reached),
                tuple(_speedup(job, machine) for _, machine in reached),
            )
        )
    return lines


def _under_each_schedule(asked: Asked) -> Iterator[tuple[str, Job]]:
    job = asked.job
    assert job.work is not None
    for schedule in asked.schedules:
        yield schedule.name, job.with_work(job.work.with_schedule(schedule))


def _speedup(job: Job, cluster: Cluster) -> float:
    """Seconds of the same blocks without overlap, over those with it, of the last MoE block."""
    block = job.shape.moe_blocks[-1]
    flops = forward_flops(job.shape, top_k=job.routes.top_k, seq_length=job.seq_length)
    without = sum(one.seconds for one in unit_passes(_plain(job), cluster, block))
    without += sum(part.total for part in unit_of(job, cluster, flops, block).before)
    return without / sum(one.seconds for one in unit_passes(job, cluster, block))


def _plain(job: Job) -> Job:
    assert job.work is not None
    return job.with_work(job.work.plain)


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
def draw(asked: Asked, path: Path, *, title: str) -> None:
    """Write the picture; its file appears whole."""
    from matplotlib.ticker import PercentFormatter

    job = asked.job

    figure = new_figure(10, 4.4, dpi=130)
    left, right = figure.subplots(1, 2, sharey=True)
    for axis, lines in ((left, by_size(asked)), (right, by_share(asked))):
        axis.axhline(1, color=NEUTRAL, linewidth=1)
        for number, line in enumerate(lines):
            axis.plot(line.at, line.speedup, markersize=4, label=line.name, **look(number))
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
    actual = _share(_plain(job), asked.cluster)
    right.axvline(actual, color="#cccccc", linewidth=6, alpha=0.5, zorder=0)
    left.legend(loc="upper left")
    figure.suptitle(title, fontsize=10)
    told = "Grey: as asked. A bound of each schedule, less what transfers take from compute."
    figure.supxlabel(told, fontsize=8, color="#555555")
    temporary = path.with_name(path.name + ".part.png")
    figure.savefig(temporary)
    temporary.replace(path)
