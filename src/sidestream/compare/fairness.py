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
SEEDS = "seeds"

# Where files lie and what is shown on the screen.
_PLACES = (
    *("name", "debug", "resume", "paths", "logger", "hydra", "trusted_targets", "data.cache_dir"),
    *("callbacks.progress", "measure.out", "measure.trace"),
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
    *(
        "device",
        "world_size",
        "expert_parallel_size",
        "transport",
        "link",
        "precision",
        "data_checksum",
        "commit",
    ),
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
