"""From runs to arms: runs that differ in nothing but their seed, in a comparison that was found fair."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sidestream.compare import fairness
from sidestream.compare.errors import CompareError
from sidestream.compare.fairness import SEED, SEEDS, STUDIED, Difference, covers, value_of
from sidestream.compare.runs import MEASUREMENT, TRAINING, LeftOut, Run
from sidestream.report.charts import COLORS
from sidestream.tracking.sweep import RECIPES


@dataclass(frozen=True, kw_only=True)
class Arm:
    """Runs with one configuration, a seed each.

    Attributes:
        name: The studied choices in which this arm may differ from others.
        values: Differing key -> value, for the baseline and the table.
        runs: In the order of their seeds.
        illustration: A measurement with the same choices, for its timeline only.
        caveat: In what the illustration differs from the arm's runs; empty if it does not.
    """

    name: str
    values: Mapping[str, str]
    runs: tuple[Run, ...]
    illustration: Run | None = None
    caveat: str = ""

    @property
    def changes_model(self) -> bool:
        return any(bool(run.result.get("changes_model")) for run in self.runs)

    @property
    def mark(self) -> str:
        return " †" if self.changes_model else ""

    @property
    def label(self) -> str:
        """Options without their groups, where there is no dot that could be lost: `nccl_ep, shortcut`."""
        values = [(key, value) for key, value in self.values.items() if value != "absent"]
        return ", ".join(f"{key}={value}" if "." in key else value for key, value in values) + self.mark

    @property
    def by_seed(self) -> dict[int, Run]:
        return {run.seed: run for run in self.runs if run.seed is not None}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared.

    Attributes:
        arms: At least two, in the order of their first runs.
        baseline: One of them.
        studied: Names of the studied groups and keys that differ.
        meant: The differences that `--differ` named and that are there.
        left_out: Folders that are not compared.
        notes: What a reader has to know, a sentence each.
    """

    arms: tuple[Arm, ...]
    baseline: Arm
    studied: tuple[str, ...]
    meant: tuple[Difference, ...]
    left_out: tuple[LeftOut, ...]
    notes: tuple[str, ...] = field(default=())

    @property
    def what(self) -> str:
        """Names the studied choices."""
        return f"Comparison of {' x '.join(self.studied or [difference.key for difference in self.meant])}"

    @property
    def also(self) -> str:
        """Names every other difference that was declared to be meant."""
        also = ", ".join(difference.title() for difference in self.meant)
        return f"; the runs also differ in {also}" if also else ""

    @property
    def title(self) -> str:
        return self.what + self.also

    def color(self, arm: Arm) -> str:
        """The same in every chart and in the table: `arm-0` for the baseline, seven others that come again."""
        others = [other.name for other in self.arms if other is not self.baseline]
        return "arm-0" if arm is self.baseline else f"arm-{1 + others.index(arm.name) % len(COLORS)}"


def compare(
    runs: Sequence[Run],
    *,
    studied: Sequence[str] | None = None,
    differ: Sequence[str] = (),
    baseline: str | None = None,
    left_out: Sequence[LeftOut] = (),
) -> Comparison:
    """Groups runs into arms, after every difference was checked.

    Args:
        runs: Finished runs. Measurements beside training runs only illustrate the arm of the same choices.
        studied: Groups or keys that may differ; None: what sweeps among the runs varied, and `STUDIED`.
        differ: Further keys, groups or facts that may differ; they go into the title.
        baseline: `key=value ...` of one arm; None: the first arm.
        left_out: Goes through to the result.

    Raises:
        CompareError: a line for each difference that is not meant, or what else keeps the runs from being compared.
    """
    if not runs:
        raise CompareError(*_nothing(left_out))
    kind = TRAINING if any(run.kind == TRAINING for run in runs) else MEASUREMENT
    compared = [run for run in runs if run.kind == kind]
    found = fairness.differences(compared)

    def belongs(difference: Difference, names: Sequence[str]) -> bool:
        return any(covers(name, difference.key) for name in names)

    keys = fairness.swept(compared) if studied is None else ()
    # Seeds are repetitions, unless runs differ in nothing else.
    of_seeds = keys == (SEED,) and not any(belongs(d, (*STUDIED, *differ)) for d in found)
    keys = keys if of_seeds else tuple(key for key in keys if key != SEED)
    studied = (*STUDIED, *keys) if studied is None else studied
    fairness.check_names(compared, [name for name in studied if name not in keys], differ)
    named = [d for d in found if belongs(d, studied) or belongs(d, differ)]
    of_sweep = [d for d in found if d not in named and fairness.on_purpose(d, compared, keys)]
    refused = [d for d in found if d not in named and d not in of_sweep]
    allowed = [*_swept(compared, keys), *(d for d in named if not belongs(d, keys))]
    groups = _group(compared, allowed)
    uneven = None if of_seeds else fairness.seed_difference(groups)
    if uneven is not None and SEEDS not in differ:
        refused.append(uneven)
    if refused:
        raise CompareError(
            *(difference.line() for difference in fairness.coarse(refused)), *map(_left_out, left_out)
        )
    if len(groups) < 2:
        raise CompareError(
            f"studied={','.join(studied)}: the {len(compared)} finished runs do not differ in any of it; expected at "
            f"least two arms; pass more folders, or --studied with what differs",
            *map(_left_out, left_out),
        )
    _one_run_per_seed(groups)
    arms = tuple(_arm(name, members, allowed) for name, members in groups.items())
    arms, not_shown = _illustrate(arms, [run for run in runs if run.kind != kind], studied)
    chosen = _find(arms, baseline)
    # What a recipe sets nobody typed: it is named with its values.
    of_recipe = of_sweep if any(key in RECIPES for key in keys) else []
    meant = fairness.coarse([d for d in [*allowed, *of_recipe] if not belongs(d, studied)])
    return Comparison(
        arms=arms,
        baseline=chosen,
        studied=tuple(d.key for d in fairness.coarse([d for d in allowed if belongs(d, studied)])),
        meant=(*meant, *([uneven] if uneven else [])),
        left_out=(*left_out, *not_shown),
        notes=tuple(_notes(arms, compared, differ, [*meant, *([uneven] if uneven else [])])),
    )


def _swept(runs: Sequence[Run], keys: Sequence[str]) -> list[Difference]:
    """What arms are called after a sweep: the keys that were swept, and nothing that follows from them."""
    found = []
    for key in keys:
        values: dict[str, str] = {}
        for run in runs:
            values.setdefault(value_of(run, key), run.name)
        if len(values) > 1:
            found.append(Difference(key=key, values=tuple(values.items())))
    return found


def _nothing(left_out: Sequence[LeftOut]) -> list[str]:
    return ["runs=0: no finished run is left; expected runs with status finished", *map(_left_out, left_out)]


def _left_out(item: LeftOut) -> str:
    return f"left out: {item.name}: {item.reason}"


def _group(runs: Sequence[Run], allowed: Sequence[Difference]) -> dict[str, list[Run]]:
    """Name of an arm -> its runs."""
    arms: dict[str, list[Run]] = {}
    for run in runs:
        # "absent" only says that another option has such a key.
        values = [(d.key, value_of(run, d.key)) for d in allowed]
        name = " ".join(f"{key}={value}" for key, value in values if value != "absent")
        arms.setdefault(name, []).append(run)
    return arms


def _one_run_per_seed(groups: Mapping[str, Sequence[Run]]) -> None:
    for name, runs in groups.items():
        known: dict[int | None, Run] = {}
        for run in runs:
            if run.seed in known:
                raise CompareError(
                    f"seed={run.seed}: arm '{name}' has two runs with it, {known[run.seed].name} and {run.name}; "
                    f"expected one run per arm and seed; pass only one of the folders"
                )
            known[run.seed] = run


def _arm(name: str, runs: Sequence[Run], allowed: Sequence[Difference]) -> Arm:
    return Arm(
        name=name,
        values={d.key: value_of(runs[0], d.key) for d in allowed},
        runs=tuple(sorted(runs, key=lambda run: (run.seed is None, run.seed))),
    )


def _find(arms: Sequence[Arm], baseline: str | None) -> Arm:
    if baseline is None:
        return arms[0]
    wanted = dict(part.partition("=")[::2] for part in baseline.split())
    fitting = [arm for arm in arms if all(value_of(arm.runs[0], k) == v for k, v in wanted.items())]
    if len(fitting) != 1:
        there = "; ".join(arm.name for arm in arms)
        raise CompareError(
            f"baseline={baseline}: {len(fitting)} arms have these choices; expected those of one arm: {there}; "
            f"pass --baseline '{(fitting or list(arms))[0].name}'"
        )
    return fitting[0]


def _illustrate(
    arms: Sequence[Arm], measurements: Sequence[Run], studied: Sequence[str]
) -> tuple[tuple[Arm, ...], list[LeftOut]]:
    """Gives each arm the measurement of its choices; further ones, and those of no arm, are left out."""
    taken: dict[str, tuple[Run, str]] = {}
    left_out = []
    for run in measurements:
        fitting = [arm for arm in arms if not _apart(arm.runs[0], run, studied)]
        free = [arm for arm in fitting if arm.name not in taken]
        if run.picture is None or not free:
            why = (
                "has no picture"
                if run.picture is None
                else "illustrates no arm"
                if not fitting
                else "is a second"
            )
            left_out.append(LeftOut(name=run.name, reason=f"a measurement of overlap that {why}"))
        for arm in free[:1] if run.picture is not None else []:
            names = [
                d.key for d in fairness.differences([arm.runs[0], run]) if d.key not in ("cpu", "tokens")
            ]
            names = [
                key
                for key in names
                if not key.startswith(("measure", "scheduler", "optimizer", "trainer", "callbacks"))
            ]
            caveat = ", ".join(f"{key}={value_of(run, key)}" for key in names if value_of(run, key) != "null")
            taken[arm.name] = (run, caveat)
    return tuple(
        Arm(
            name=arm.name,
            values=arm.values,
            runs=arm.runs,
            illustration=taken.get(arm.name, (None, ""))[0],
            caveat=taken.get(arm.name, (None, ""))[1],
        )
        for arm in arms
    ), left_out


def _apart(one: Run, other: Run, studied: Sequence[str]) -> bool:
    found = fairness.differences([one, other])
    return any(covers(name, difference.key) for name in studied for difference in found)


def _notes(
    arms: Sequence[Arm], runs: Sequence[Run], differ: Sequence[str], meant: Sequence[Difference]
) -> list[str]:
    notes = [f"Of {run.name}: {line}." for run in runs for line in run.skipped]
    for name in differ:
        if not any(covers(name, difference.key) for difference in meant):
            notes.append(f"--differ {name} was given, but the runs do not differ in it.")
    if missing := fairness.unchecked(runs):
        notes.append(f"Not recorded in any run, so not checked: {', '.join(missing)}.")
    if any(str(run.result.get("commit") or "").endswith("-dirty") for run in runs):
        notes.append(
            "The code had uncommitted changes: runs of one -dirty commit may have run different code."
        )
    return notes
