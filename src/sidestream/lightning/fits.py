"""Whether a checkpoint is of this run's text, model and optimizer, asked before anything of it is read into them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from sidestream.config.errors import ConfigError
from sidestream.tracking.integrity import Damaged
from sidestream.tracking.untrusted import printable

_WEIGHTS = "state_dict."


def refuse(folder: Path, why: str, *, expected: str, fix: str = "run anew without resume=") -> ConfigError:
    """What a rank says of a checkpoint that is whole and not this run's."""
    shown = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    return ConfigError("resume", shown, f"{folder.name} {why}", expected=expected, fix=fix)


def check_weights(folder: Path, metadata: Metadata, weights: Mapping[str, Any]) -> None:
    """Compare names and sizes, both ways: DCP would leave out what this model lacks.

    Raises:
        ConfigError: The checkpoint is another model's.
    """
    here = {name: tuple(tensor.size()) for name, tensor in weights.items() if isinstance(tensor, Tensor)}
    there = {
        name.removeprefix(_WEIGHTS): tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(_WEIGHTS) and isinstance(entry, TensorStorageMetadata)
    }
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            sizes = [str(list(found[name])) if name in found else "none" for found in (there, here)]
            why = f"is of another model: {printable(name)} is {sizes[0]} there and {sizes[1]} here"
            raise refuse(folder, why, expected="a checkpoint of this model")


def name_of(optimizer: Optimizer) -> str:
    """The optimizer's class, as a checkpoint names it."""
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


@contextmanager
def one_line(folder: Path) -> Iterator[None]:
    """Around the load: what torch says of an optimizer that lacks a state, such as momentum that was off."""
    try:
        yield
    except (Damaged, ConfigError):
        raise
    except (RuntimeError, ValueError, KeyError) as error:
        why = f"does not fit this optimizer: {printable(error)}"
        raise refuse(folder, why, expected="the optimizer of the run") from error


def check_facts(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare what a checkpoint says of its run with this one.

    Args:
        saved: Its part `sidestream`; what an earlier version did not write is not compared.
        now: The same of this run.

    Raises:
        ConfigError: naming what is another.
    """

    def differs(name: str) -> bool:
        return name in saved and saved[name] != now[name]

    if differs("format"):
        why = f"has format {printable(saved['format'])}"
        raise refuse(folder, why, expected=f"format {now['format']}")
    if differs("data_checksum"):
        sums = f"checksum {printable(saved['data_checksum'])[:12]} there and {now['data_checksum'][:12]} here"
        expected = "the files of the original run; for data=python_source its interpreter"
        raise refuse(folder, f"was trained on other text: {sums}", expected=expected)
    if differs("changes_model") or differs("function"):
        names = f"{printable(saved.get('function', 'plain'))} there and {now['function']} here"
        why = f"was trained under an overlap or router.force_balance that computes another model: {names}"
        raise refuse(folder, why, expected="the choices of the run; overlap.enabled=false is the same model")
    if differs("optimizer"):
        names = f"{printable(saved['optimizer'])} there and {now['optimizer']} here"
        raise refuse(folder, f"is of another optimizer: {names}", expected="the optimizer of the run")


__all__ = ["check_facts", "check_weights", "name_of", "one_line", "refuse"]
