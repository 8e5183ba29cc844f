"""A wait for other ranks that was in vain, told in one line: where, for whom, and what to set."""

import os
import re

from sidestream.launch import phase
from sidestream.launch.silence import look_at

# Texts of gloo, of torch's stores, of NCCL, and of `fusion=mega`.
_IN_VAIN = re.compile(
    r"timed out waiting \d+ ?ms|wait timeout|socket timeout|watchdog caught|did not answer within",
    re.IGNORECASE,
)


class LostExchange(RuntimeError):
    """A transfer or a reduction that did not come to its end.

    Args:
        where: What is waited for, such as `dispatch of MoE layer 2`.
        members: The group and who is in it, such as `expert-parallel group, ranks 0, 1`; may be empty.
        ranks: Global ranks of the group.
        why: What the library said.
    """

    def __init__(self, where: str, members: str, ranks: list[int], why: str) -> None:
        super().__init__(f"{where} ({members}): {why}" if members else f"{where}: {why}")
        self.where, self.members, self.ranks = where, members, ranks


def explain(error: BaseException) -> str | None:
    """Returns one line for an error that says no more than that others did not come; None for any other."""
    if not isinstance(error, RuntimeError) or not _IN_VAIN.search(str(error)):
        return None
    now = phase.current()
    where, members, ranks = now.doing or "a common operation", "", _all_ranks()
    if isinstance(error, LostExchange):
        where, members, ranks = error.where, f" ({error.members})", error.ranks
    line = (
        f"no answer within {now.timeout:.0f} s in: {now.place}, {where}{members}; missing: {_missing(ranks)}"
    )
    return f"{line}; if it was only slow, set strategy.timeout_seconds={2 * now.timeout:.0f}"


def _missing(ranks: list[int]) -> str:
    """The ranks that have not come: those that a signal has stopped, else those that are behind this one."""
    me = int(os.environ.get("RANK", 0))
    there = {rank: where for rank, where in phase.others(len(_all_ranks())).items() if rank in ranks}
    stopped = [rank for rank, where in there.items() if (process := look_at(where.pid)) and process.stopped]
    behind = [rank for rank, where in there.items() if where.beats < phase.current().beats]
    found = stopped or behind
    if not found:
        rest = [str(rank) for rank in ranks if rank != me]
        return f"rank {rest[0]}" if len(rest) == 1 else f"one of ranks {', '.join(rest)}"
    how = "stopped by a signal, " if stopped else ""
    return ", ".join(f"rank {rank} ({how}in: {there[rank]})" for rank in found)


def _all_ranks() -> list[int]:
    return list(range(int(os.environ.get("WORLD_SIZE", 1))))


__all__ = ["LostExchange", "explain"]
