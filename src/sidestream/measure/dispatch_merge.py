"""Results of several environments and starts as one, and the rule that decides between two arms. No torch here."""

from __future__ import annotations

import copy
import math
import random
import statistics
from typing import Any

# Two results can be one only where these are the same.
SAME = (
    "schema_version",
    "benchmark",
    "host",
    "commit",
    "device",
    "precision",
    "seed",
    "rounds",
    "warmup_rounds",
)
SIZES = ("tokens", "hidden_size", "expert_hidden_size", "num_experts", "top_k", "world_size")
MIN_STARTS = 3
MAX_CV = 0.05
_SAMPLES = 4000


def key(record: dict[str, Any]) -> tuple[Any, ...]:
    """What a record is of: its sizes and its kind of routing."""
    return (*(record[name] for name in SIZES), record["routing"]["kind"])


def merge(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One result of several: arms are put together, and an arm that is in several has been started several times.

    Args:
        results: Name (of a file) -> result, without statistics or with old ones.

    Raises:
        ValueError: They do not belong together.
    """
    (first_name, first), *others = results.items()
    merged = copy.deepcopy(first)
    for name, result in others:
        for field in SAME:
            if result[field] != first[field]:
                raise ValueError(
                    f"merge {name}: {field} is {result[field]}, in {first_name} {first[field]}; expected the same"
                )
        wanted, found = ({key(record) for record in each["results"]} for each in (first, result))
        if wanted != found:
            raise ValueError(
                f"merge {name}: other shapes or routings than {first_name}; expected the same --shapes and --routing"
            )
        known = {one["id"] for one in merged["environments"]}
        if known & {one["id"] for one in result["environments"]}:
            raise ValueError(f"merge {name}: a measurement that {first_name} or another file holds already")
        shift = len(merged["environments"])
        merged["environments"] += copy.deepcopy(result["environments"])
        merged["load_average"] = {
            "before": merged["load_average"]["before"],
            "after": result["load_average"]["after"],
        }
        merged["dirty"] = bool(merged["dirty"] or result["dirty"])
        by_key = {key(record): record for record in merged["results"]}
        for record in result["results"]:
            _add(by_key[key(record)], record, shift=shift, names=(first_name, name))
    merged["starts"] = max(
        len(arm["starts"]) for record in merged["results"] for arm in record["arms"].values()
    )
    return merged


def _add(into: dict[str, Any], record: dict[str, Any], *, shift: int, names: tuple[str, str]) -> None:
    """Take the arms of a record into another of the same key."""
    label = f"shape {record['shape']}, routing {record['routing']['kind']}"
    if into["routing"]["hash"] != record["routing"]["hash"]:
        raise ValueError(
            f"merge {names[1]}: {label}: routing hash {record['routing']['hash']}, in {names[0]} "
            f"{into['routing']['hash']}; expected the same, so that all arms had the same work"
        )
    for name, arm in record["arms"].items():
        arm = copy.deepcopy(arm)
        for start in arm["starts"]:
            start["environment"] += shift
        there = into["arms"].get(name)
        if there is None:
            into["arms"][name] = arm
        elif there["transport"] != arm["transport"]:
            raise ValueError(
                f"merge {names[1]}: {label}: {name} ran with transport {arm['transport']}, in {names[0]} with "
                f"{there['transport']}; expected the same, or dispatcher.transport in the arm's name"
            )
        else:
            there["starts"] += arm["starts"]
    into["left_out"] = {
        name: reason
        for name, reason in {**record["left_out"], **into["left_out"]}.items()
        if name not in into["arms"]
    }


def decide(record: dict[str, Any], first: str, second: str, *, part: str = "cycle") -> dict[str, Any]:
    """Is one arm faster than another? A paired bootstrap over starts and, inside them, rounds.

    Rounds of one number have one routing, so they are pairs, also across environments.

    Returns:
        `ratio`: geometric mean of first over second. `low`, `high`: its 95 % interval. `supported`: the interval does
        not hold 1, there are at least 3 starts of both, the medians of each arm's starts vary by at most 5 % of their
        mean, and neither loses routes. `reasons`: what is missing of that.

    Raises:
        ValueError: An arm is not in the record.
    """
    for name in (first, second):
        if name not in record["arms"]:
            raise ValueError(f"compare={name}: expected one of {', '.join(record['arms'])}")
    arms = [record["arms"][name] for name in (first, second)]
    starts = [
        [math.log(a / b) for a, b in zip(one["rounds_ms"][part], other["rounds_ms"][part])]
        for one, other in zip(arms[0]["starts"], arms[1]["starts"])
    ]
    generator = random.Random(0)
    means = sorted(
        statistics.fmean(
            value
            for rounds in generator.choices(starts, k=len(starts))
            for value in generator.choices(rounds, k=len(rounds))
        )
        for _ in range(_SAMPLES)
    )
    low, high = (math.exp(means[round(share * (_SAMPLES - 1))]) for share in (0.025, 0.975))
    ratio = math.exp(statistics.fmean(value for rounds in starts for value in rounds))
    reasons = _missing((first, second), arms, len(starts), part)
    if low <= 1 <= high:
        reasons.append("the interval holds 1")
    return {
        "shape": record["shape"],
        "routing": record["routing"]["kind"],
        "first": first,
        "second": second,
        "part": part,
        "starts": len(starts),
        "ratio": round(ratio, 4),
        "low": round(low, 4),
        "high": round(high, 4),
        "supported": not reasons,
        "reasons": reasons,
    }


def _missing(names: tuple[str, str], arms: list[dict[str, Any]], starts: int, part: str) -> list[str]:
    reasons = [] if starts >= MIN_STARTS else [f"{starts} start(s) of both, expected {MIN_STARTS}"]
    for name, arm in zip(names, arms):
        medians = [statistics.median(start["rounds_ms"][part]) for start in arm["starts"]]
        cv = statistics.stdev(medians) / statistics.fmean(medians) if len(medians) > 1 else 0.0
        if cv > MAX_CV:
            reasons.append(f"the starts of {name} vary by {100 * cv:.0f} %, expected at most 5 %")
        if arm["static"] and arm["static"]["dropped_share"]:
            reasons.append(f"{name} loses routes")
    return reasons


def in_words(decision: dict[str, Any]) -> str:
    """A decision in one line."""
    d = decision
    verdict = "supported" if d["supported"] else f"not supported: {'; '.join(d['reasons'])}"
    return (
        f"{d['shape']}, {d['routing']}: {d['first']} / {d['second']} = {d['ratio']:.3f} ({d['low']:.3f} to "
        f"{d['high']:.3f}), {verdict}"
    )
