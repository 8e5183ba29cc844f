"""What a list of rounds is told as: the one place where medians and quartiles of plain numbers are made."""

from __future__ import annotations

import statistics


def summarize(values: list[float]) -> dict[str, float]:
    """Minimum, quartiles, median and maximum of a list of rounds."""
    ordered = sorted(values)
    q1, _, q3 = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    return {
        "min": ordered[0],
        "q1": round(q1, 4),
        "median": round(statistics.median(ordered), 4),
        "q3": round(q3, 4),
        "max": ordered[-1],
    }
