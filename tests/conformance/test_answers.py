"""What parts of the user's own answer on the host, and whether their classes take their keys: one line each."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from sidestream import build
from sidestream.config.compatibility import check
from sidestream.config.errors import ConfigError
from sidestream.conformance import answers
from sidestream.data.corpus import Corpus
from sidestream.evaluate import encode
from sidestream.launch import entry
from sidestream.lightning.loggers import build_loggers

CONF = Path(__file__).parents[2] / "conf"
HERE = "sidestream_tests_answers"  # a package of the user's


class Answers:
    """A schedule, a link, a source of data: whichever is asked."""

    def __init__(self, answer: Any, **_: Any) -> None:
        self.answer = answer

    def __call__(self, step: int) -> Any:
        return self.answer

    def completion(self, *, sent_bytes: int, received_bytes: int) -> Any:
        return self.answer

    def load(self) -> Any:
        return self.answer

    def encode(self, text: str) -> Any:
        return self.answer


def said(function: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        function(*arguments, **named)
    return str(refused.value)


@pytest.mark.parametrize("value", [None, "1", -1.0, float("nan"), float("inf"), [1.0], torch.ones(2)])
def test_a_factor_that_no_rate_can_have_is_refused(value: Any) -> None:
    line = said(answers.factor_of(Answers(value)), 7)
    assert line.startswith(f"scheduler={__name__}.Answers: returns ") and "for step 7" in line


@pytest.mark.parametrize("value", [0, 1, 0.5, np.float32(0.5), torch.tensor(0.5)])
def test_a_factor_is_given_on_as_it_is(value: Any) -> None:
    assert answers.factor_of(Answers(value))(0) is value


@pytest.mark.parametrize("value", ["soon", float("inf"), 1e300, float("nan"), [1.0]])
def test_a_completion_that_never_comes_is_refused(value: Any) -> None:
    line = said(answers.link_of(Answers(value)).completion, sent_bytes=1, received_bytes=1)
    assert line.startswith(f"link={__name__}.Answers: completion returns ")


def test_a_link_is_otherwise_itself() -> None:
    link = Answers(due := time.monotonic())
    assert answers.link_of(link).completion(sent_bytes=1, received_bytes=1) == due
    assert answers.link_of(link).answer == due


TOKENS = np.arange(8, dtype=np.uint16)
CORPORA = {
    "a NoneType": None,
    "vocab_size=0": {"vocab_size": 0},
    "checksum=''": {"checksum": ""},
    "eos_token=9 with tokens of 0 to 7": {"eos_token": 9},
    "train_tokens that are float32": {"train_tokens": TOKENS.astype(np.float32)},
    "val_tokens that are": {"val_tokens": [1, 2]},
    "val_tokens with the ids 0 to 8": {"val_tokens": np.arange(9)},
    "train_tokens with the ids -1 to 7": {"train_tokens": np.arange(9) - 1},
}


@pytest.mark.parametrize("problem", CORPORA)
def test_a_source_that_gives_no_corpus_is_refused(problem: str) -> None:
    plain = {"name": "mine", "vocab_size": 8, "train_tokens": TOKENS, "val_tokens": TOKENS, "checksum": "c"}
    changed = CORPORA[problem]
    source: Any = Answers(None if changed is None else Corpus(**{**plain, **changed}))
    line = said(answers.load, source)
    assert line.startswith(f"data={__name__}.Answers: load gives {problem}"), line
    whole: Any = Answers(Corpus(**plain))
    assert answers.load(whole) is whole.answer


@pytest.mark.parametrize("tokens", [None, "text", [1.5], [-1]])
def test_a_prompt_that_becomes_no_tokens_names_the_source(tokens: Any) -> None:
    source: Any = Answers(tokens)
    assert said(encode, source, "x", vocab_size=4).startswith(f"data={__name__}.Answers: encode gives ")


class NoInit(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        pass


class Forgets(torch.optim.SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(list(params)[:1], lr=0.1)


class NoRate(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


class NoClosure(torch.optim.SGD):
    def step(self) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (NoInit, "has no param_groups"),
        (Forgets, "holds 1 parameters, and was given 2"),
        (NoRate, "has no lr"),
        (NoClosure, "has a step without the argument closure"),
    ],
)
def test_an_optimizer_that_no_run_can_step_is_refused(made: Any, problem: str) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    line = said(answers.check_optimizer, made(parameters), parameters)
    assert line.startswith(f"optimizer={__name__}.{made.__name__}: {problem}"), line
    answers.check_optimizer(torch.optim.Adam(parameters), parameters)


@pytest.mark.parametrize("group", ["graph", "link", "strategy", "data"])
def test_a_class_that_lacks_what_is_called_is_named(group: str) -> None:
    line = said(answers.check_complete, group, SimpleNamespace())
    assert line.startswith(f"{group}=types.SimpleNamespace: has no ")


# Classes and their keys, in a package of the user's.

MODULE = """
import torch
class Scheduler:
    def __init__(self, max_steps, tempo=1): pass
    def __call__(self, step): return 1.0
class Optimizer(torch.optim.SGD):
    def __init__(self, params, lr): super().__init__(params, lr=lr)
class Link:
    def __init__(self, gbps): raise KeyError("no such wire")
    def completion(self, **sizes): return None
class Router:
    def __init__(self, top_k): self.top_k = top_k
    def __call__(self, logits, **options): pass
class Strategy:
    def __init__(self): pass
    def shard(self, *a): pass
    def last_micro_batch(self): pass
def logger(context): return 3
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with options whose classes are not ours."""
    (tmp_path / f"{HERE}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, HERE, raising=False)
    yield tmp_path
    sys.modules.pop(HERE, None)


def composed(users: Path, group: str, option: str) -> DictConfig:
    (users / group).mkdir(exist_ok=True)
    (users / group / "mine.yaml").write_text(option)
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        typed = [f"{group}=mine", f"trusted_targets=[{HERE}]", f"hydra.searchpath=[file://{users}]"]
        return compose("train", typed)


@pytest.mark.parametrize(
    ("group", "option", "keys", "takes"),
    [
        ("scheduler", "Scheduler\nwarmup_steps: 3", "warmup_steps", "max_steps, tempo"),
        ("optimizer", "Optimizer\nlr: 0.1\nbetas: [0.9, 0.9]", "lr, betas", "lr"),
        ("router", "Router\ntop_k: 2\ntemperature: 1", "top_k, temperature", "top_k"),
        ("link", "Link", "", "gbps"),
        (
            "strategy",
            "Strategy\nexpert_parallel_size: auto\ntimeout_seconds: 5\nbucket_mb: 2",
            "bucket_mb",
            "",
        ),
    ],
)
def test_a_class_that_does_not_take_its_keys_is_refused_before_any_rank(
    users: Path, group: str, option: str, keys: str, takes: str
) -> None:
    cfg = composed(users, group, f"_target_: {HERE}.{option}\n")
    line = said(check, cfg, device_count=0)
    name = option.partition("\n")[0]
    assert line.startswith(
        f"{group}={HERE}.{name}: cannot be built with {f'the keys {keys}' if keys else 'no keys'}:"
    )
    assert f"the keys that it takes: {takes or 'none'}; run with -cd <folder> {group}=<name>" in line
    if group not in ("optimizer", "scheduler"):  # which are given something beside their keys
        make = build.reduction if group == "strategy" else lambda cfg: build.make(cfg, group)
        assert said(make, cfg).partition(";")[0] == line.partition(";")[0]


def test_keys_that_a_class_takes_are_given_to_it(users: Path) -> None:
    for group, option in {"scheduler": "Scheduler\ntempo: 3", "optimizer": "Optimizer\nlr: 0.5"}.items():
        cfg = composed(users, group, f"_target_: {HERE}.{option}\n")
        check(cfg, device_count=0)
    built = build.optimizer_builder(cfg)(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    assert built.param_groups[0]["lr"] == 0.5


def test_what_a_constructor_raises_names_class_and_keys(users: Path) -> None:
    cfg = composed(users, "link", f"_target_: {HERE}.Link\ngbps: 3\n")
    check(cfg, device_count=0)
    line = said(build.make, cfg, "link")
    assert line.startswith(
        f"link={HERE}.Link: cannot be built with the keys gbps: KeyError: 'no such wire'; "
    )


def test_a_value_that_an_optimizer_of_torch_does_not_take_names_it(users: Path) -> None:
    cfg = composed(users, "optimizer", "_target_: torch.optim.Adagrad\nlr: 0.1\nlr_decay: -1\n")
    check(cfg, device_count=0)
    line = said(build.optimizer_builder(cfg), torch.nn.Linear(2, 2))
    assert (
        "optimizer=torch.optim.adagrad.Adagrad: cannot be built with the keys lr, lr_decay: ValueError"
        in line
    )


def test_a_logger_that_is_none_is_named(users: Path, tmp_path: Path) -> None:
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        typed = ["logger=csv", f"logger._target_={HERE}.logger", f"trusted_targets=[{HERE}]"]
        cfg = compose("train", typed)
    arguments: Any = {"folder": tmp_path, "cfg": cfg, "choices": {}, "identity": {}, "rank": 0}
    line = said(build_loggers, cfg.logger, **arguments)
    assert line.startswith(f"logger={HERE}.logger: gives a int; ")
