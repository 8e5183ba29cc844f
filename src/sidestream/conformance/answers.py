"""Parts of the user's that are asked on the host, outside a step's work: each answer is looked at where it is given.

The schedule of the rate and the link are asked in every step, the optimizer and the data once. What an answer must not
be ends the run with one line that names the class. Shipped parts stay as they are.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sidestream.config.errors import ConfigError
from sidestream.data.corpus import Corpus, DataSource

_SHIPPED = "sidestream"
_SHIPPED_OPTIMIZERS = (torch.optim.AdamW, torch.optim.SGD)
_LONGEST_TRANSFER = 1e6  # seconds
_SAMPLE = 1 << 20  # tokens at either end of a split; those between are looked at when they are read


def class_of(part: Any) -> str:
    """`package.Class`, as a config names it."""
    return f"{type(part).__module__}.{type(part).__qualname__}"


def is_own(part: Any) -> bool:
    """The user's, not shipped."""
    return type(part).__module__.partition(".")[0] != _SHIPPED


def is_own_optimizer(optimizer: Any) -> bool:
    """None that an option names."""
    return type(optimizer) not in _SHIPPED_OPTIMIZERS


def refusal(group: str, part: Any, problem: str, *, expected: str) -> ConfigError:
    """One line about what a part of the user's did."""
    option = {"scheduler": "wsd", "link": "native", "optimizer": "adamw", "data": "python_source"}
    option |= {"graph": "none", "strategy": "replicate"}
    return ConfigError(
        group,
        class_of(part),
        problem,
        expected=expected,
        fix=f"correct the class, or run with {group}={option[group]}",
    )


# What the others of this package call, whatever is trained; a class without one is told before it is missed.
_CALLED = {
    "graph": "lint open place bind run update counts close",
    "link": "completion",
    "strategy": "holds_replicas shard attach reattach zero last_micro_batch shard_group close",
    "data": "load encode decode",
}


def check_complete(group: str, part: Any) -> None:
    """Refuses an object of the user's that lacks what its group's protocol has.

    Raises:
        ConfigError: naming what is missing.
    """
    lacking = [name for name in _CALLED.get(group, "").split() if not hasattr(part, name)]
    if is_own(part) and lacking:
        raise refusal(
            group, part, f"has no {', '.join(lacking)}", expected="its protocol, see docs/architecture.md"
        )


def factor_of(schedule: Callable[[int], float]) -> Callable[[int], float]:
    """The schedule, or what asks it and looks at the answers.

    Raises:
        ConfigError: in the returned function, for a factor that no learning rate can have.
    """
    if not is_own(schedule):
        return schedule

    def factor(step: int) -> float:
        value = schedule(step)
        number = isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
        if not number or not math.isfinite(float(value)) or float(value) < 0:
            expected = "a finite number, 0 or more, that optimizer.lr is multiplied by"
            raise refusal("scheduler", schedule, f"returns {value!r} for step {step}", expected=expected)
        return value

    return factor


class _Link:
    """A link of the user's."""

    def __init__(self, link: Any) -> None:
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def completion(self, *, sent_bytes: int, received_bytes: int) -> float | None:
        due: float | None = self._link.completion(sent_bytes=sent_bytes, received_bytes=received_bytes)
        latest = time.monotonic() + _LONGEST_TRANSFER
        if due is None or (isinstance(due, int | float | np.number) and -math.inf < due < latest):
            return due
        expected = f"time.monotonic() seconds of the next {_LONGEST_TRANSFER:g}, or None"
        raise refusal("link", self._link, f"completion returns {due!r}", expected=expected)


def link_of(link: Any) -> Any:
    """The link, or what asks it and looks at the answers."""
    return _Link(link) if is_own(link) else link


def load(source: DataSource) -> Corpus:
    """The corpus of a source.

    Raises:
        ConfigError: A source of the user's gives none that can be trained on.
    """
    corpus = source.load()
    if is_own(source) and (problem := _corpus_problem(corpus)):
        raise refusal("data", source, f"load gives {problem}", expected="a Corpus, see data/corpus.py")
    return corpus


def _corpus_problem(corpus: Any) -> str | None:
    if not isinstance(corpus, Corpus):
        return f"a {type(corpus).__name__}"
    if not isinstance(corpus.vocab_size, int | np.integer) or corpus.vocab_size < 1:
        return f"vocab_size={corpus.vocab_size!r}"
    if not isinstance(corpus.checksum, str) or not corpus.checksum:
        return f"checksum={corpus.checksum!r}"
    last = corpus.vocab_size - 1
    eos = corpus.eos_token
    if eos is not None and not (isinstance(eos, int | np.integer) and 0 <= eos <= last):
        return f"eos_token={eos!r} with tokens of 0 to {last}"
    for name in ("train_tokens", "val_tokens"):
        tokens = getattr(corpus, name)
        if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            what = (
                f"{tokens.dtype} of shape {tokens.shape}" if isinstance(tokens, np.ndarray) else type(tokens)
            )
            return f"{name} that are {what}, not an array of integers with one axis"
        for part in (tokens[:_SAMPLE], tokens[-_SAMPLE:]):
            if part.size and not (part.min() >= 0 and part.max() <= last):
                return f"{name} with the ids {part.min()} to {part.max()}, and vocab_size={corpus.vocab_size}"
    return None


def check_encoded(source: DataSource, tokens: Any) -> None:
    """Refuses what a source of the user's makes of a prompt, if it is no list of tokens.

    Raises:
        ConfigError: naming it.
    """
    fine = isinstance(tokens, list | tuple) and all(
        isinstance(t, int | np.integer) and t >= 0 for t in tokens
    )
    if is_own(source) and not fine:
        raise refusal("data", source, f"encode gives {str(tokens)[:80]}", expected="a list of tokens")


def check_optimizer(optimizer: Any, parameters: Sequence[Tensor]) -> None:
    """Refuses an optimizer that a run cannot step.

    Args:
        optimizer: As it was built.
        parameters: That it was given.

    Raises:
        ConfigError: naming what is wrong.
    """
    if not is_own_optimizer(optimizer):
        return
    groups = getattr(optimizer, "param_groups", None)
    held = [id(parameter) for group in groups or [] for parameter in group["params"]]
    problem = ""
    if groups is None:
        problem = "has no param_groups: its constructor does not call that of torch.optim.Optimizer"
    elif sorted(held) != sorted(map(id, parameters)):
        problem = f"holds {len(held)} parameters, and was given {len(parameters)}"
    elif any("lr" not in group for group in groups):
        problem = "has no lr in its param_groups, which the schedule multiplies"
    else:
        try:
            inspect.signature(optimizer.step).bind(closure=None)
        except TypeError:
            problem = "has a step without the argument closure"
    if problem:
        expected = "an optimizer as torch.optim has them, with a rate"
        raise refusal("optimizer", optimizer, problem, expected=expected)
