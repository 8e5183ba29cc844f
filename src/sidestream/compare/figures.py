"""The figures of each arm: medians over seeds for times, means for losses, differences to the baseline by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidestream.compare.arms import Arm, Comparison
from sidestream.compare.runs import Run
from sidestream.report.statistics import Interval, interval, median, paired, quartiles
from sidestream.tracking import names
from sidestream.tracking.folder import is_count, is_figure

# As `sidestream.lightning.recorder.WARMUP_STEPS`, which cannot be read without torch; a test compares them.
WARMUP_STEPS = 5
# Share of the steps' time spent waiting for a core. Two ranks on two cores: 0.08 to 0.14 when nothing else runs: a
# rank waits for the threads of its own transfers; 0.24 to 0.31 beside one or two programs that keep a core busy.
BUSY = 0.2
LOSSES = {"val_loss": names.VAL_LOSS, "train_loss": names.TRAIN_LOSS}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A loss over tokens, over the seeds that have a record there: nats per token."""

    tokens: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]  # smallest of the seeds
    high: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What is known of one arm.

    Attributes:
        flat: Column of compare.csv -> value, None where unknown; the same columns for all arms.
        curves: `val_loss`, `train_loss` -> over tokens.
        differences: The same names -> this arm minus the baseline, paired by seed, at equal tokens.
    """

    arm: Arm
    flat: Mapping[str, Any]
    curves: Mapping[str, Curve]
    differences: Mapping[str, Interval | None]

    @property
    def speed_ratio(self) -> tuple[float | None, float | None, float | None]:
        """The speed over the baseline's: median, smallest and largest of the seeds; None where there is none."""
        if self.flat["baseline"]:
            return (1.0 if self.flat["tokens_per_second"] else None), None, None
        if self.flat["timing"] == "busy":
            return None, None, None
        ratio, low, high = (self.flat[f"tokens_per_second_ratio{part}"] for part in ("", "_min", "_max"))
        return ratio, low, high

    @property
    def ratio_text(self) -> str:
        """`\u00d7 0.95 (0.90 to 1.01)`, or why there is no ratio; empty for the baseline."""
        ratio, low, high = self.speed_ratio
        if self.flat["timing"] == "busy":
            return "busy machine"
        span = f" ({low:.2f} to {high:.2f})" if low is not None and high is not None and low < high else ""
        if self.flat["timing"]:
            return f"not told apart{span}"
        return "" if ratio is None or self.flat["baseline"] else f"\u00d7 {ratio:.2f}{span}"


def figures(comparison: Comparison) -> list[Figures]:
    """The figures of all arms, in their order."""
    equal = {name: equal_tokens(comparison, metric) for name, metric in LOSSES.items()}
    return [_figures(comparison, arm, equal) for arm in comparison.arms]


def equal_tokens(comparison: Comparison, metric: str) -> int | None:
    """The largest number of training tokens at which every run recorded the metric; None if there is none."""
    recorded = [series(run, metric).keys() for arm in comparison.arms for run in arm.runs]
    common = set(recorded[0]).intersection(*recorded[1:])
    return max(common) if common else None


def series(run: Run, metric: str) -> dict[int, float]:
    """Tokens -> value, where the metric was recorded."""
    return {
        r[names.TOKENS]: r[metric]
        for r in run.metrics
        if r.get(metric) is not None and is_count(r.get(names.TOKENS))
    }


def steady(run: Run, metric: str) -> list[float]:
    """The records of a metric that hold no step of the warm-up: allocations and kernel look-ups are not speed."""
    stated = run.config.get("trainer.log_every_n_steps")
    every = stated if is_count(stated) and stated else 1
    return [
        r[metric] for r in run.metrics if r.get(metric) is not None and r[names.STEP] - every >= WARMUP_STEPS
    ]


def curve(arm: Arm, metric: str) -> Curve:
    points: dict[int, list[float]] = {}
    for run in arm.runs:
        for tokens, value in series(run, metric).items():
            points.setdefault(tokens, []).append(value)
    at = sorted(points)
    return Curve(
        tokens=tuple(at),
        mean=tuple(statistics.fmean(points[tokens]) for tokens in at),
        low=tuple(min(points[tokens]) for tokens in at),
        high=tuple(max(points[tokens]) for tokens in at),
    )


def _figures(comparison: Comparison, arm: Arm, equal: Mapping[str, int | None]) -> Figures:
    first = arm.runs[0]
    flat: dict[str, Any] = {"arm": arm.name, "baseline": arm is comparison.baseline}
    for group in ("dispatcher", "overlap", "fusion", "graph"):
        flat[group] = first.choices.get(group)
    for key in (d for other in comparison.arms for d in other.values):
        flat.setdefault(key, arm.values.get(key))
    for key in ("transport", "link", "device", "world_size", "expert_parallel_size", "precision", "commit"):
        flat[key] = first.result.get(key)
    gbps = first.config.get("link.gbps")
    flat["link_gbps"] = gbps if is_figure(gbps) else None
    flat["changes_model"] = arm.changes_model
    flat["seeds"] = " ".join(str(run.seed) for run in arm.runs)
    flat["tokens"] = first.part("metrics").get("tokens")
    flat |= _times(arm, comparison.baseline)
    flat |= _overlap(arm)
    flat["bytes_on_wire"] = _median(arm, "metrics", "bytes_on_wire")
    flat["dropped"] = _total(arm, "overflow", "dropped")
    flat["replays"] = _total(arm, "overflow", "replays")
    flat["mfu"] = _median(arm, "metrics", "mfu")
    flat["peak_memory_bytes"] = _median(arm, "metrics", "peak_memory_bytes")
    differences = {}
    for name, tokens in equal.items():
        mine, base = _at(arm, name, tokens), _at(comparison.baseline, name, tokens)
        difference = None if arm is comparison.baseline else paired(mine, base)
        differences[name] = difference
        values = list(mine.values())
        flat[f"{name}_tokens"] = tokens
        flat[name] = statistics.fmean(values) if values else None
        flat[f"{name}_sd"] = statistics.stdev(values) if len(values) > 1 else None
        flat[f"{name}_difference"] = difference and difference.mean
        flat[f"{name}_low"] = difference and difference.low
        flat[f"{name}_high"] = difference and difference.high
        flat[f"{name}_pairs"] = difference and difference.n
    curves = {name: curve(arm, metric) for name, metric in LOSSES.items()}
    return Figures(arm=arm, flat=flat, curves=curves, differences=differences)


def _at(arm: Arm, loss: str, tokens: int | None) -> dict[int, float]:
    """Seed -> loss at a number of tokens."""
    if tokens is None:
        return {}
    return {seed: series(run, LOSSES[loss])[tokens] for seed, run in arm.by_seed.items()}


def waited_share(arm: Arm) -> float | None:
    """Of the steps' time, for which the worst rank of the worst run wanted a core and had none; None if unknown."""
    known = [value for run in arm.runs if (value := run.part("metrics").get("waited_share")) is not None]
    return max(known, default=None)


def _timing(arm: Arm, baseline: Arm, ratios: Sequence[float]) -> str:
    """Why the speed of an arm is not compared with the baseline's; empty if it is."""
    if any((waited_share(one) or 0.0) > BUSY for one in (arm, baseline)):
        return "busy"
    if len(ratios) > 1:
        mean = interval([math.log(ratio) for ratio in ratios])
        return "" if mean.excludes_zero else "noise"
    mine, base = (quartiles(steady(one.runs[0], names.STEP_MS)) for one in (arm, baseline))
    if mine is None or base is None:
        return "noise"
    return "" if mine[0] > base[2] or mine[2] < base[0] else "noise"


def _times(arm: Arm, baseline: Arm) -> dict[str, Any]:
    steps = [quartiles(steady(run, names.STEP_MS)) for run in arm.runs]
    speed, base = _speeds(arm), _speeds(baseline)
    pairs = [(speed[seed], base[seed]) for seed in sorted(speed.keys() & base.keys())]
    ratios = [mine / other for mine, other in pairs if mine > 0 and other > 0]
    timing = "" if arm is baseline else _timing(arm, baseline, ratios)
    return {
        "waited_share": waited_share(arm),
        "timing": timing,
        "tokens_per_second": median(list(speed.values())),
        "tokens_per_second_min": min(speed.values(), default=None),
        "tokens_per_second_max": max(speed.values(), default=None),
        "tokens_per_second_ratio": None if arm is baseline or timing else median(ratios),
        "tokens_per_second_ratio_min": None if arm is baseline else min(ratios, default=None),
        "tokens_per_second_ratio_max": None if arm is baseline else max(ratios, default=None),
        "step_ms": median([_step_ms(run) for run in arm.runs]),
        "step_ms_q1": median([q[0] for q in steps if q]),
        "step_ms_q3": median([q[2] for q in steps if q]),
    }


def _speeds(arm: Arm) -> dict[int, float]:
    """Seed -> tokens per second: the median of the records, else what result.json has."""
    found: dict[int, float | None] = {
        seed: median(steady(run, names.TOKENS_PER_SECOND)) or run.part("metrics").get("tokens_per_second")
        for seed, run in arm.by_seed.items()
    }
    return {seed: value for seed, value in found.items() if value is not None}


def _step_ms(run: Run) -> float | None:
    found = median(steady(run, names.STEP_MS))
    return run.part("metrics").get("step_ms") if found is None else found


def _overlap(arm: Arm) -> dict[str, float | None]:
    """Exposed is what exchanges still add to compute: overlapped minus compute, and its share of overlapped."""
    parts = [run.part("overlap") for run in arm.runs]
    exposed = [_both(part, lambda done, compute: done - compute) for part in parts]
    shares = [_both(part, lambda done, compute: (done - compute) / done if done else None) for part in parts]
    return {
        "exposed_ms": median(exposed),
        "exposed_share": median(shares),
        "e_hide": median([part.get("e_hide") for part in parts]),
        "e_hide_bound": median([part.get("bound") for part in parts]),
    }


def _both(part: Mapping[str, Any], of: Callable[[float, float], float | None]) -> float | None:
    done, compute = part.get("overlapped_ms"), part.get("compute_ms")
    return None if done is None or compute is None else of(done, compute)


def _median(arm: Arm, part: str, key: str) -> float | None:
    return median([run.part(part).get(key) for run in arm.runs])


def _total(arm: Arm, part: str, key: str) -> int | None:
    known = [value for run in arm.runs if (value := run.part(part).get(key)) is not None]
    return sum(known) if known else None


def remarks(comparison: Comparison, all_figures: Sequence[Figures]) -> list[str]:
    """What a reader should know beside the figures, a sentence each."""
    runs = [run for arm in comparison.arms for run in arm.runs]
    lines = list(comparison.notes)
    pairs = [d.n for f in all_figures for d in f.differences.values() if d is not None]
    tokens = all_figures[0].flat["val_loss_tokens"]
    if tokens is not None:
        lines.append(
            f"Losses are nats per token, means over seeds (standard deviation), at {tokens:,} training tokens: the "
            f"last validation that every run has."
        )
    elif any(run.metrics for run in runs):
        lines.append("No validation at a number of tokens that all runs share: no loss is compared.")
    if pairs and min(pairs) < 2:
        lines.append("One seed proves nothing: a difference without an interval may be chance.")
    if pairs and max(pairs) > 1:
        lines.append(
            f"Differences are paired by seed against '{comparison.baseline.name}', with 95 % confidence intervals "
            f"(Student's t over {_span(pairs)} pairs), not corrected for the number of arms."
        )
    if pairs and 1 < min(pairs) < 5:
        lines.append("Few seeds: these intervals lean on the assumption that the differences are normal.")
    if all_figures[0].flat["tokens_per_second"] is not None:
        lines.append(
            f"Timings are medians after {WARMUP_STEPS} steps of warm-up, quartiles over the records; \u00d7 is "
            f"the median over seeds of the ratio to the baseline, with smallest and largest, which the bars show "
            f"too. No ratio is given where seeds (their 95 % interval), or the steps of a single one (their "
            f"quartiles), do not tell the arms apart. They are "
            f"timings from separate runs, and other programs change them; for a fair timing use "
            f"scripts/measure_overlap.py or scripts/bench_dispatch.py, whose ratios are within one run."
        )
    if busy := [of.arm.name for of in all_figures if (of.flat["waited_share"] or 0.0) > BUSY]:
        lines.append(
            f"\u2021 busy machine: ranks waited for a core for more than {100 * BUSY:.0f} % of their steps. "
            f"The speed of these arms is not compared: {', '.join(busy)}."
        )
    if any(run.result.get("changes_model") for run in runs):
        lines.append("† computes another function than the plain model: its loss compares two models.")
    hidden = [value for f in all_figures if (value := f.flat["e_hide"]) is not None]
    if hidden and (min(hidden) < 0 or max(hidden) > 1.05):
        lines.append(
            "E_hide below 0 means slower than the serial run, above 1 measured wrongly; runs measure it in few rounds."
        )
    if any(str(run.part("metrics").get("peak_source") or "").startswith("measured") for run in runs):
        lines.append("The peak behind MFU was measured anew by each run: compare MFU with care.")
    if any(f.flat["link"] not in (None, "native") for f in all_figures):
        lines.append("The link is emulated where it is not native.")
    return lines


def _span(numbers: Sequence[int]) -> str:
    return str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"
