"""`scripts/check_part.py`: which kind of part a class is, how it is built, and what came of its properties."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from sidestream.config.errors import ConfigError
from sidestream.conformance.suite import Property, Verdict, verdicts

KINDS = ("router", "balance", "dispatcher", "fusion", "overlap")
_KEY = "part"
_USUAL = {"top_k": 2, "update_rate": 0.001, "coefficient": 0.01, "ema": 0.9}


def find_class(target: str) -> Any:
    """The class of a dotted name.

    Raises:
        ConfigError: There is none.
    """
    module, _, name = target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name) if module else None
    except (ImportError, AttributeError) as error:
        raise _refuse(target, f"{type(error).__name__}: {error}") from error
    if not inspect.isclass(found):
        raise _refuse(target, "not a class" if module else "no module in front of the name")
    return found


def _refuse(target: str, why: str) -> ConfigError:
    return ConfigError(
        _KEY,
        target,
        why,
        expected="the dotted name of a class, such as sidestream.routing.router.SoftmaxRouter",
        fix="run it from the folder that holds the package",
    )


def kind_of(cls: Any) -> str:
    """The config group that a class belongs to, from the methods of its protocol.

    Raises:
        ConfigError: It has none of them.
    """
    if all(hasattr(cls, name) for name in ("wire", "plan", "dispatch", "combine")):
        return "dispatcher"
    if hasattr(cls, "start") and getattr(cls, "replaces_dispatcher", False):
        return "fusion"
    if hasattr(cls, "commit") and hasattr(cls, "loss"):
        return "balance"
    calls = [vars(base)["__call__"] for base in cls.__mro__ if inspect.isfunction(vars(base).get("__call__"))]
    taken = {name for call in calls for name in inspect.signature(call).parameters}
    for kind, name in {"overlap": "unit", "fusion": "received", "router": "logits"}.items():
        if name in taken:
            return kind
    raise ConfigError(
        _KEY,
        f"{cls.__module__}.{cls.__qualname__}",
        f"its methods and arguments are those of none of {', '.join(KINDS)}",
        expected="a protocol of docs/architecture.md, with its names of arguments",
        fix="run it with --kind router (or another), if it is one",
    )


def arguments_for(cls: Any, kind: str, overrides: Sequence[str], *, conf: Path) -> dict[str, Any]:
    """Keyword arguments of the class: those of its option in `conf/`, or usual ones, then the overrides.

    Args:
        cls: The class.
        kind: Its group, which may stand in front of a key: `router.top_k=2` or `top_k=2`.
        overrides: `key=value`, values in YAML.
        conf: Folder of the groups.

    Raises:
        ConfigError: Not `key=value`.
    """
    target, arguments = f"{cls.__module__}.{cls.__qualname__}", {}
    for file in sorted((conf / kind).glob("*.yaml")):
        option = _option(file)
        if option.pop("_target_", None) == target:
            arguments = option
            break
    else:
        needed = inspect.signature(cls).parameters.values()
        arguments = {p.name: _USUAL[p.name] for p in needed if p.default is p.empty and p.name in _USUAL}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            why = "not a key=value"
            raise ConfigError(
                "override", override, why, expected="key=value", fix=f"run it with {key or 'top_k'}=2"
            )
        arguments[key.removeprefix(f"{kind}.")] = yaml.safe_load(value)
    return arguments


def _option(file: Path) -> dict[str, Any]:
    """An option of a group with those that it starts from, without the schemas."""
    own = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    from_others = [name for name in own.pop("defaults", []) if isinstance(name, str) and name[0] not in "/_"]
    found: dict[str, Any] = {}
    for name in from_others:
        found |= _option(file.with_name(f"{name}.yaml"))
    return found | own


def maker(cls: Any, arguments: dict[str, Any]) -> Callable[[], Any]:
    """What makes a part anew. Tried once.

    Raises:
        ConfigError: The class does not take these arguments.
    """
    try:
        cls(**arguments)
    except (TypeError, ValueError) as error:
        given = " ".join(f"{key}={value}" for key, value in arguments.items()) or "no arguments"
        raise ConfigError(
            _KEY,
            f"{cls.__module__}.{cls.__qualname__}",
            f"cannot be built with {given}: {' '.join(str(error).split())}",
            expected="key=value for every argument without a default",
            fix="run it with these behind the class",
        ) from error
    return partial(cls, **arguments)


def needs_ranks(cls: Any, kind: str) -> bool:
    """Its properties are about rows that travel."""
    return kind in ("dispatcher", "overlap") or hasattr(cls, "start")


def properties_of(cls: Any, kind: str) -> list[Property]:
    """What a class of this kind promises. Those of ranks take what makes a part, the others take the part."""
    # Imported here: the parent of ranks needs no torch.
    if kind == "router":
        from sidestream.conformance.routers import ROUTER as found
    elif kind == "balance":
        from sidestream.conformance.balances import BALANCE as found
    elif kind == "dispatcher":
        from sidestream.conformance.movers import DISPATCHER as found
    elif kind == "overlap":
        from sidestream.conformance.schedules import SCHEDULE as found
    elif hasattr(cls, "start"):
        from sidestream.conformance.movers import FUSED as found
    else:
        from sidestream.conformance.experts import FUSION as found
    return found


def tried(cls: Any, kind: str, make: Callable[[], Any]) -> Iterator[Verdict]:
    """Try every property on this rank. With ranks: collective; a property holds where it holds on all of them.

    Raises:
        ValueError: One rank failed in the middle of what the ranks do together, so no more can be tried.
    """
    if not needs_ranks(cls, kind):
        yield from verdicts(properties_of(cls, kind), make())
        return
    import torch.distributed as dist

    for item in properties_of(cls, kind):
        if not item.applies(make):
            continue
        try:
            problem = item.check(make)
        except Exception as error:
            said = f"rank {dist.get_rank()}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise ValueError(Verdict(item.name, said).line()) from error
        every: list[str | None] = [problem] * dist.get_world_size()
        dist.all_gather_object(every, problem)
        rank = next((rank for rank, found in enumerate(every) if found is not None), None)
        yield Verdict(item.name, None if rank is None else f"rank {rank}: {every[rank]}")


def run_plain(job: dict[str, Any], *, say: Callable[[str], object]) -> list[dict[str, Any]]:
    """One rank of `measure.ranks.run_ranks`: the verdicts in plain types."""
    cls = find_class(job["target"])
    found = []
    for verdict in tried(cls, job["kind"], maker(cls, job["arguments"])):
        say(verdict.line())
        found.append(vars(verdict))
    return found
