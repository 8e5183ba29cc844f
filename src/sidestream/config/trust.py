"""What a `_target_` may be, and whose word counts.

A config names classes, and a config may come from anybody: it is part of every run folder. So a name is believed only
if it is one of ours for its group, or a class that is defined in a package which this command line, or the user's own
settings file, trusts. Attributes lead anywhere (`torch.optim.optimizer.torch.hub.load`), so what counts is where the
class is defined, not how its name begins. Nothing is imported for our own names.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sidestream.config.errors import ConfigError
from sidestream.tracking.untrusted import Unreadable, read_yaml

KEY = "trusted_targets"
VARIABLE = "SIDESTREAM_TRUSTED"  # of a rank: what the process that started it trusts
TRUSTED_TARGETS = ("sidestream", "torch.optim")  # of these, what `GROUPS` says


@dataclass(frozen=True)
class Buildable:
    """What a group may build.

    Attributes:
        ours: The names in `conf/`: accepted as they are.
        methods: What a class of the user's must define.
        library, base: Classes of this package that are derived from this class count as ours; a class of the
            user's must be derived from it too.
        functions: A function will do.
    """

    ours: frozenset[str] = frozenset()
    methods: tuple[str, ...] = ()
    library: str = ""
    base: str = ""
    functions: bool = False


def _part(package: str, names: str, *methods: str, **rest: Any) -> Buildable:
    return Buildable(frozenset(f"{package}.{name}" for name in names.split()), methods, **rest)


GROUPS = {
    "router": _part(
        "sidestream.routing",
        "router.SoftmaxRouter router.SigmoidRouter router.SqrtSoftplusRouter",
        "__call__",
    ),
    "balance": _part(
        "sidestream.routing",
        "balance.AuxLoss balance.NoBalance balance.ExpertBias quantile.QuantileBalance",
        "loss",
        "commit",
    ),
    "dispatcher": _part(
        "sidestream.dispatch",
        "none.NoDispatcher local.LocalDispatcher alltoall.AllToAllDispatcher allgather.AllGatherDispatcher "
        "nccl_ep.NcclEPDispatcher deep_ep.DeepEPDispatcher hybrid_ep.HybridEPDispatcher",
        "dispatch",
        "combine",
    ),
    "fusion": _part(
        "sidestream.fusion", "grouped.GroupedExperts loop.LoopExperts mega.fused.MegaExperts", "__call__"
    ),
    "overlap": _part(
        "sidestream.overlap",
        "none.NoOverlap shared_expert.SharedExpertOverlap chunked.ChunkedOverlap two_batch.TwoBatchOverlap "
        "shortcut.ShortcutOverlap",
        "__call__",
    ),
    "graph": _part("sidestream.graph", "none.NoGraph step.StepGraph", "run"),
    "link": _part("sidestream.exchange.link", "NativeLink ThrottledLink", "completion"),
    "strategy": _part(
        "sidestream.parallel", "replicate.Replicate fully_shard.FullyShard", "shard", "last_micro_batch"
    ),
    "optimizer": _part(
        "torch.optim", "AdamW SGD", "step", library="torch.optim", base="torch.optim.Optimizer"
    ),
    "scheduler": _part("sidestream.lightning.schedules", "Constant Cosine WSD", "__call__"),
    "data": _part(
        "sidestream.data",
        "python_source.PythonSource text.TextFiles token_files.TokenFiles huggingface.HuggingFace",
        "load",
        "encode",
        "decode",
    ),
    "logger": _part(
        "sidestream.lightning.loggers", "csv_logger tensorboard_logger wandb_logger", functions=True
    ),
    "measure": _part("sidestream.measure.overlap_run", "measure", functions=True),
}
_ALL = frozenset[str]().union(*(part.ours for part in GROUPS.values()))
_OWN = {name.partition(".")[0] for name in TRUSTED_TARGETS}


def check_targets(cfg: DictConfig, *, imports: bool = True) -> None:
    """Checks every `_target_` of a config.

    Args:
        cfg: The root config. Its `trusted_targets` is what this process trusts, see `believed`.
        imports: Classes of users are looked up. False: their names have to do, for what builds nothing.

    Raises:
        ConfigError: for the first that its group may not build.
    """
    # Resolved: an interpolation may name a class too.
    for key, target in _targets(OmegaConf.to_container(cfg, resolve=True), ""):
        _check(key, target, _list(cfg), imports=imports)


def check_part(group: str, node: DictConfig, cfg: DictConfig) -> None:
    """Checks what a group is about to build, as `check_targets` does.

    Args:
        node: The group's config.
        cfg: The root config.
    """
    for key, target in _targets(OmegaConf.to_container(node, resolve=True), group):
        _check(key, target, _list(cfg), imports=True)


def find(key: str, target: str, cfg: DictConfig) -> Any:
    """Returns the class or function of a `_target_`, checked as `check_targets` does."""
    _check(key, target, _list(cfg), imports=True)
    return _walk(key, target, _list(cfg))


def check_foreign(key: str, target: Any, cfg: DictConfig) -> None:
    """Checks a `_target_` that is none of a group's, such as a callback of Hydra's: only the user's packages count."""
    trusted = _list(cfg)
    _check_name(key, target, Buildable(), trusted)
    if why := _unfit(_walk(key, target, trusted), Buildable(), trusted):
        raise ConfigError(key, target, why, expected="a class that you trust", fix=f"remove {key}")


def believed(words: Sequence[str]) -> list[str]:
    """Returns what this process trusts: what its command line says, and the user's settings. No folder has a say.

    Args:
        words: The words of the command line; the last `trusted_targets=[...]` counts.

    Raises:
        ConfigError: something there is no name of a package, or the settings cannot be read.
    """
    said = [word.partition("=")[2] for word in words if word.lstrip("+").partition("=")[0] == KEY]
    typed = [part.strip(" '\"") for part in said[-1].strip().strip("[]").split(",")] if said else []
    trusted = list(dict.fromkeys([*(name for name in typed if name not in ("", "null")), *_of_settings()]))
    for name in trusted:
        if not isinstance(name, str) or not all(map(_is_plain, name.rstrip(".").split("."))):
            expected = "names of packages, written out"
            raise ConfigError(
                KEY, trusted, f"{name} is no name", expected=expected, fix=f"{KEY}=[my_package]"
            )
    return trusted


def settings_file() -> Path:
    """Returns where the user's own settings are. A relative path would be in whatever folder this is started in."""
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (base if base.is_absolute() else Path("~/.config").expanduser()) / "sidestream" / "settings.yaml"


def _of_settings() -> list[str]:
    path = settings_file()
    if not path.exists():
        return []
    try:
        content = read_yaml(path)
        trusted = content.get(KEY, [])
        why = "" if set(content) <= {KEY} and isinstance(trusted, list) else f"holds more than a list {KEY}"
    except Unreadable as error:
        why = str(error)
    if why:
        raise ConfigError("settings", path, why, expected=f"{KEY}: [my_package]", fix="correct this file")
    return trusted


def _list(cfg: DictConfig) -> list[str]:
    return list(cfg.get(KEY) or [])


def _targets(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict | list):
        for name, value in node.items() if isinstance(node, dict) else enumerate(node):
            path = f"{key}.{name}" if key else str(name)
            if name == "_target_":
                yield path, value
            else:
                yield from _targets(value, path)


def _check(key: str, target: Any, trusted: list[str], *, imports: bool) -> None:
    group, _, rest = key.partition(".")
    part = GROUPS.get(group)
    if part is None:
        expected = f"a _target_ of {', '.join(GROUPS)}"
        raise ConfigError(key, target, "nothing is built here", expected=expected, fix=f"remove {key}")
    if rest != "_target_":  # an argument of a part: no part itself, so it need not be able to do what one can
        part = replace(part, ours=_ALL, methods=(), base="", functions=False)
    if isinstance(target, str) and target in part.ours:
        return
    _check_name(key, target, part, trusted)
    if imports and (why := _unfit(_walk(key, target, trusted), part, trusted)):
        raise ConfigError(
            key, target, why, expected=_expected(group, part), fix=f"remove {key} or name another"
        )


def _check_name(key: str, target: Any, part: Buildable, trusted: list[str]) -> None:
    """Whether the package is one that may be imported, for this group."""
    names = target.split(".") if isinstance(target, str) else [""]
    group, package = key.partition(".")[0], names[0]
    if len(names) < 2 or not all(map(_is_plain, names)):
        why, expected = "no name of a class", "a package, its modules and a class, with dots between"
        raise ConfigError(key, target, why, expected=expected, fix=f"remove {key} or correct it")
    if (part.library and _within(target, [part.library])) or _within(target, trusted):
        if importlib.util.find_spec(package) is None:
            why = f"{package} cannot be imported"
            expected = "a package that is installed, on PYTHONPATH or in the current folder"
            raise ConfigError(
                key, target, why, expected=expected, fix=f"run from the folder that holds {package}"
            )
        return
    if package in _OWN:
        why = f"not what {group} builds"
        raise ConfigError(key, target, why, expected=_expected(group, part), fix=f"{group}=<option>")
    raise ConfigError(
        key,
        target,
        "this class is not from a trusted package",
        expected=f"a class of {', '.join([*TRUSTED_TARGETS, *trusted])}",
        fix=f"{KEY}=[{','.join([*trusted, package])}] if you trust it",
    )


def _walk(key: str, target: str, trusted: list[str]) -> Any:
    """Returns what a name leads to. Every module on the way belongs to a package that is trusted."""
    names = target.split(".")
    found: Any = None
    try:
        for n, name in enumerate(names):
            path = ".".join(names[: n + 1])
            if n == 0:
                found = importlib.import_module(name)
            elif inspect.ismodule(found):
                found = getattr(found, name) if hasattr(found, name) else importlib.import_module(path)
            else:
                found = inspect.getattr_static(found, name) if isinstance(found, type) else None
            if inspect.ismodule(found) and found.__name__ != path and not _belongs(found.__name__, trusted):
                raise ImportError(f"{path} is the module {found.__name__}")
    except Exception as error:
        why = f"cannot be found ({type(error).__name__}: {error})"
        raise ConfigError(key, target, why, expected="an existing class", fix=f"correct {key}") from error
    return found


def _unfit(found: Any, part: Buildable, trusted: list[str]) -> str:
    """Says why a group may not build this; empty if it may."""
    if not isinstance(found, type) and not (part.functions and inspect.isfunction(found)):
        return f"a {type(found).__name__}, no class"
    if f"{found.__module__}.{found.__qualname__}" in part.ours:
        return ""
    if not _belongs(found.__module__, trusted) and not (
        part.library and _within(found.__module__, [part.library])
    ):
        return f"defined in {found.__module__}, which is not a trusted package"
    if not isinstance(found, type):
        return ""
    if part.base:
        module, _, name = part.base.rpartition(".")
        if not issubclass(found, getattr(importlib.import_module(module), name)):
            return f"not derived from {part.base}"
    lacking = [name for name in part.methods if not any(name in vars(base) for base in found.__mro__)]
    return f"a class without {', '.join(lacking)}" if lacking else ""


def _belongs(module: str, trusted: list[str]) -> bool:
    """Whether a module is of a package that the user named, or named a part of."""
    return any(module.partition(".")[0] == name.partition(".")[0] for name in trusted)


def _within(name: str, prefixes: Sequence[str]) -> bool:
    return any(f"{name}.".startswith(f"{prefix.rstrip('.')}.") for prefix in prefixes)


def _is_plain(name: str) -> bool:
    """Whether a part of a name is as it looks: no `__globals__`, no letter that stands for another."""
    return name.isidentifier() and not name.startswith("__") and unicodedata.normalize("NFKC", name) == name


def _expected(group: str, part: Buildable) -> str:
    what = f"a class derived from {part.base}" if part.base else f"a class with {', '.join(part.methods)}"
    own = f", or {what}" if part.base or part.methods else ""
    return f"one of {', '.join(sorted(part.ours))}{own} of a package that you trust"


__all__ = [
    "GROUPS",
    "KEY",
    "TRUSTED_TARGETS",
    "VARIABLE",
    "Buildable",
    "believed",
    "check_foreign",
    "check_part",
    "check_targets",
    "find",
    "settings_file",
]
