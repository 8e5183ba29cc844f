"""Whether runs may be compared: what differs beside the studied choices is refused by name.

Two sources: the config, key by key, and facts of the run that no key says, such as the transport that was found or the
commit. Runs that differ only in their seed are repetitions; arms must have the same set of seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sidestream.compare.errors import CompareError
from sidestream.compare.runs import MEASUREMENT, TRAINING, Run

STUDIED = ("dispatcher", "overlap", "fusion", "graph")
SEEDS, SEED = "seeds", "seed"
# Facts that follow from a key: where it was swept, they differ on purpose.
FOLLOWS = {
    "device": ("trainer.accelerator", "trainer.devices"),
    "world_size": ("trainer.devices", "trainer.accelerator"),
    "expert_parallel_size": (
        "strategy",
        "trainer.devices",
        "trainer.accelerator",
        "model",
        "dispatcher",
        "fusion",
    ),
    "transport": ("dispatcher", "fusion", "strategy", "trainer.devices", "trainer.accelerator"),
    "link": ("link",),
    "precision": ("trainer.precision",),
    "data_checksum": ("data",),
    "tokens": ("trainer.max_steps", "data"),
}

# Where files lie and what is shown on the screen.
_PLACES = (
    "name",
    "debug",
    "resume",
    "paths",
    "logger",
    "hydra",
    "trusted_targets",
    "data.cache_dir",
    "callbacks.progress",
    "measure.out",
    "measure.trace",
)
# `auto` and `2` are two spellings of one number; the facts say what it was.
_SAID_BY_FACTS = ("trainer.accelerator", "trainer.devices", "strategy.expert_parallel_size")
IGNORED = (*_PLACES, *_SAID_BY_FACTS, "seed")


def _fact(key: str) -> Callable[[Run], Any]:
    return lambda run: run.result.get(key)


def _config_value(key: str) -> Callable[[Run], Any]:
    return lambda run: run.config.get(key, _ABSENT)


def _choice(group: str) -> Callable[[Run], Any]:
    return lambda run: run.choices.get(group)


class _Absent:
    """The value of a key that a config lacks; not null, which a config may say."""


_ABSENT = _Absent()
_OF_THE_CHOICE = _Absent()  # a fact that follows from a choice which is compared itself


def _transport(run: Run) -> Any:
    """`fusion=mega` moves rows itself: its transport is that choice, and a column of the table."""
    return _OF_THE_CHOICE if run.choices.get("fusion") == "mega" else run.result.get("transport")


_OF_RESULT = (
    "device",
    "world_size",
    "expert_parallel_size",
    "transport",
    "link",
    "precision",
    "data_checksum",
    "commit",
)
FACTS: Mapping[str, Callable[[Run], Any]] = {
    **{key: _fact(key) for key in _OF_RESULT},
    "transport": _transport,
    "cpu": lambda run: run.env.get("cpu"),
    "gpu": lambda run: run.env.get("gpu"),
    "torch": lambda run: (run.result.get("versions") or {}).get("torch"),
    "tokens": lambda run: run.part("metrics").get("tokens"),
}
# Without them runs may still be compared, but the page says that nobody checked.
_EXPECTED = {
    TRAINING: [name for name in FACTS if name != "gpu"],
    MEASUREMENT: [name for name in FACTS if name not in ("gpu", "data_checksum", "tokens")],
}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A key with more than one value.

    Attributes:
        key: What `--differ` takes.
        values: Value -> name of the first run or arm that has it, in order; at least two.
    """

    key: str
    values: tuple[tuple[str, str], ...]

    def line(self) -> str:
        """The refusal: both values, the runs that have them, and what says that it is meant."""
        (first, there), (other, here) = self.values[:2]
        more = f" and {len(self.values) - 2} more values" if len(self.values) > 2 else ""
        return (
            f"{self.key}={other} in {here}: it is {first} in {there}{more}; expected the same in every run; "
            f"pass --differ {self.key} if this difference is meant"
        )

    def title(self) -> str:
        """`link.gbps (1, 10)`."""
        return f"{self.key} ({', '.join(value for value, _ in self.values)})"


def covers(name: str, key: str) -> bool:
    """Whether `name` is a key or a group that it belongs to: `link` covers `link.gbps`."""
    return key == name or key.startswith(f"{name}.")


def show(value: Any) -> str:
    """A value as it is typed in a config."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(show(item) for item in value) + "]"
    return str(value)


def check_names(runs: Sequence[Run], studied: Sequence[str], differ: Sequence[str]) -> None:
    """A misspelt key would hide a difference, or claim one in the title.

    Raises:
        CompareError: a name of `studied` or `differ` is no group, key or fact of any run.
    """
    keys = {key for run in runs for key in (*run.config, *run.choices)} | FACTS.keys() | {SEEDS, *STUDIED}
    for flag, names in (("studied", studied), ("differ", differ)):
        for name in names:
            if not any(covers(name, key) for key in keys):
                raise CompareError(
                    f"{flag}={name}: no run has such a key; expected a group such as overlap, a key such as link.gbps, "
                    f"or one of {', '.join([*FACTS, SEEDS])}; pass --{flag} with one of them"
                )


def differences(runs: Sequence[Run]) -> list[Difference]:
    """Every key and fact in which runs differ, whatever is studied; seeds are not among them.

    Where another option of a group was chosen, that is the difference; keys that only one option has are part of it.
    """
    found: list[Difference] = []
    keys = sorted({key for run in runs for key in run.config if not any(covers(i, key) for i in IGNORED)})
    groups: set[str] = set()
    for key in keys:
        values = _values(runs, _config_value(key))
        if not values:
            continue
        group = key.partition(".")[0]
        options = _values(runs, _choice(group))
        if options and group not in groups:
            groups.add(group)
            found.append(Difference(key=group, values=options))
        if options and (key.endswith("._target_") or _follows(runs, key, group)):
            continue
        found.append(Difference(key=key, values=values))
    named = {difference.key for difference in found}
    for fact, read in FACTS.items():
        # The choice `link` and the fact `link` are one thing.
        if fact not in named and (values := _values(runs, read)):
            found.append(Difference(key=fact, values=values))
    return found


def swept(runs: Sequence[Run]) -> tuple[str, ...]:
    """Keys that the jobs of a sweep among these runs do not all set to the same value, in the order they were typed.

    Places and displays are not among them; the seed is.
    """
    keys: dict[str, None] = {}
    for sweep in dict.fromkeys(run.sweep for run in runs if run.sweep is not None):
        jobs = [run.overrides for run in runs if run.sweep == sweep]
        for key in dict.fromkeys(key for overrides in jobs for key in overrides):
            if len({overrides.get(key) for overrides in jobs}) > 1 and not any(
                covers(i, key) for i in _PLACES
            ):
                keys[key] = None
    return tuple(keys)


def on_purpose(difference: Difference, runs: Sequence[Run], keys: Sequence[str]) -> bool:
    """Whether a difference comes from what was swept.

    A fact does if it follows from one of these keys. What a config has does if jobs of one sweep differ in it (they
    have everything in common but their overrides), and all runs with the same swept values agree in it.
    """
    if difference.key in FACTS:
        return any(
            covers(cause, key) or covers(key, cause)
            for cause in FOLLOWS.get(difference.key, ())
            for key in keys
        )
    values: dict[tuple[str, ...], set[str]] = {}
    of_sweep: dict[str | None, set[str]] = {}
    for run in runs:
        found = show(run.choices.get(difference.key, run.config.get(difference.key, _ABSENT)))
        values.setdefault(tuple(value_of(run, key) for key in keys), set()).add(found)
        of_sweep.setdefault(run.sweep, set()).add(found)
    varies = any(len(found) > 1 for sweep, found in of_sweep.items() if sweep is not None)
    return varies and all(len(found) == 1 for found in values.values())


def value_of(run: Run, key: str) -> str:
    """What a run has for a group, a config key, a fact, or an override that is none of these."""
    if key in run.choices:
        return show(run.choices[key])
    if key in FACTS:
        return show(FACTS[key](run))
    return show(run.config[key]) if key in run.config else run.overrides.get(key, "absent")


def coarse(found: Sequence[Difference]) -> list[Difference]:
    """Without the keys of a group that is there itself."""
    keys = {difference.key for difference in found}
    return [d for d in found if not any(d.key != key and covers(key, d.key) for key in keys)]


def _follows(runs: Sequence[Run], key: str, group: str) -> bool:
    """Whether the key differs only because some options lack it."""
    per_option: dict[Any, set[str]] = {}
    for run in runs:
        per_option.setdefault(run.choices.get(group), set()).add(
            show(run.config[key]) if key in run.config else "absent"
        )
    known = set().union(*per_option.values()) - {"absent"}
    return all(len(values) == 1 for values in per_option.values()) and len(known) <= 1


def _values(runs: Iterable[Run], read: Callable[[Run], Any]) -> tuple[tuple[str, str], ...]:
    """Value -> first run that has it; empty if there is only one value."""
    values: dict[str, str] = {}
    for run in runs:
        value = read(run)
        if value is _OF_THE_CHOICE:
            continue
        values.setdefault("absent" if value is _ABSENT else show(value), run.name)
    return tuple(values.items()) if len(values) > 1 else ()


def seed_difference(arms: Mapping[str, Sequence[Run]]) -> Difference | None:
    """Arms (name -> runs) that were not run with the same seeds."""
    values: dict[str, str] = {}
    for name, runs in arms.items():
        seeds = sorted({run.seed for run in runs if run.seed is not None})
        values.setdefault("[" + ",".join(map(str, seeds)) + "]", f"arm '{name}'")
    return Difference(key=SEEDS, values=tuple(values.items())) if len(values) > 1 else None


def unchecked(runs: Sequence[Run]) -> list[str]:
    """Facts that no run recorded: equal as far as anybody knows."""
    return [name for name in _EXPECTED[runs[0].kind] if all(FACTS[name](run) is None for run in runs)]
