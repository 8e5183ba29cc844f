"""Shipped parts keep their promises; parts that break one are caught, with the property and the sentence."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidestream.conformance.command import arguments_for, find_class, kind_of, maker, needs_ranks, tried
from sidestream.conformance.suite import Verdict
from tests.conformance import broken
from tests.rank_pool import ranks

CONF = Path(__file__).resolve().parents[2] / "conf"
HERE = broken.__name__

# class: what it is told, and what is said of it
ALONE = {
    "Twice": ({"top_k": 2}, "expert_ids has expert .* twice for token 0"),
    "OutOfRange": ({"top_k": 2}, "expert_ids has expert 10 for token .*, expected -1 to 7"),
    "ShortIds": ({"top_k": 2}, "expert_ids is int32, expected int64"),
    "WrongCounts": ({"top_k": 2}, "counts has .* routes for expert 0, and the ids have"),
    "NanWeights": ({"top_k": 2}, "weights is not finite at"),
    "Shares": ({"top_k": 2}, "probs of token 0 add up to 0.5, expected 1"),
    "Untrained": ({"top_k": 2}, "the weights carry no gradient"),
    "Pair": ({"top_k": 2}, "it returns a tuple, expected a Decision"),
    "RoutesPadding": ({"top_k": 2}, "has an expert for token .*, which is padding"),
    "BiasInWeights": ({"top_k": 2}, "the bias is in the weights"),
    "VectorLoss": ({"coefficient": 0.01}, r"its loss has shape \[2\], expected \[\]"),
    "NanLoss": ({"coefficient": 0.01}, "its loss is not finite"),
    "BiasAway": ({"update_rate": 0.001}, "the bias after commit is not finite"),
    "NewBias": ({"update_rate": 0.001}, "commit returns a Tensor"),
    "Fp32Mean": ({"update_rate": 0.001}, "1966081 routes for each of 384 experts move the bias by 0.001"),
    "Backwards": ({"update_rate": 0.001}, "the busiest expert has .* routes at first, and .* after"),
    "Observes32": ({"ema": 0.5}, "what observe returns is float32, expected float64"),
    "ReadsTheTail": ({}, "its result is not finite"),
    "NarrowResult": ({}, r"its result has shape \[40, 31\], expected \[40, 32\]"),
    "TwiceWeighted": ({}, "output is off by"),
    "Relu": ({}, "output is off by"),
}
TOGETHER = {
    "LosesAToken": "relative error of output",
    "ComesBackElsewhere": "relative error of output",
    "ForgetsWeights": "relative error of output",
    "LongOffsets": "offsets is int64, expected int32",
    "NeverSerial": "with enabled=false it still overlaps: mm is computed while dispatch travels",
    "ForgetsToReport": "routes are reported per layer, expected 96: call unit.moe.report once each",
    "ForgetsToFinish": "transfers that it started are not finished",
    "Flat": r"its result has shape \[48, 32\], expected \[4, 12, 32\]",
    "WithoutShared": "differs from overlap=none by",
    "OtherNumbersWhenSerial": "differs between enabled=true and false",
}


def judged(target: str, arguments: dict[str, Any]) -> list[Verdict]:
    cls = find_class(target)
    return list(tried(cls, kind_of(cls), maker(cls, arguments)))


def judged_together(rank: int, world: int, jobs: list[tuple[str, dict[str, Any]]]) -> list[list[Verdict]]:
    """Of one class after another; a class of which something raised is told by that."""
    found: list[list[Verdict]] = []
    for target, arguments in jobs:
        found.append([])
        try:
            cls = find_class(target)
            for verdict in tried(cls, kind_of(cls), maker(cls, arguments)):
                found[-1].append(verdict)
        except ValueError as error:
            found[-1].append(Verdict("raised", str(error)))
    return found


def problems(found: list[Verdict]) -> str:
    return "\n".join(verdict.line() for verdict in found if verdict.problem is not None)


# Of those that need ranks; the others are for `make test-full`.
SAMPLE = ("AllToAllDispatcher", "DeepEPDispatcher", "MegaExperts", "TwoBatchOverlap", "ShortcutOverlap")


def shipped() -> list[tuple[str, str, dict[str, Any]]]:
    """Group, class and arguments of the options of conf/ that run on this machine."""
    options: list[tuple[str, str, dict[str, Any]]] = []
    options.append(("fusion", "sidestream.fusion.mega.fused.MegaExperts", {}))  # its option is a global one
    for kind in ("router", "balance", "dispatcher", "fusion", "overlap"):
        for file in sorted((CONF / kind).glob("*.yaml")):
            target = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("_target_")
            if target is not None and not target.endswith(("NoDispatcher", "LocalDispatcher")):
                options.append((kind, target, arguments_for(find_class(target), kind, [], conf=CONF)))
    return options


@pytest.mark.parametrize(
    ("kind", "target", "arguments"),
    [option for option in shipped() if not needs_ranks(find_class(option[1]), option[0])],
    ids=lambda value: value.rpartition(".")[2] if isinstance(value, str) else "",
)
def test_shipped_parts_keep_their_promises(kind: str, target: str, arguments: dict[str, Any]) -> None:
    assert kind_of(find_class(target)) == kind
    found = judged(target, arguments)
    assert len(found) >= 3 and not problems(found), problems(found)


@pytest.mark.full
@pytest.mark.parametrize("sampled", [True, pytest.param(False, marks=pytest.mark.full)])
def test_shipped_parts_that_need_ranks_keep_their_promises(sampled: bool) -> None:
    options = [option for option in shipped() if needs_ranks(find_class(option[1]), option[0])]
    options = [option for option in options if option[1].endswith(SAMPLE) is sampled]
    jobs = [(target, arguments) for _, target, arguments in options]
    assert len(jobs) >= 5 and all(kind_of(find_class(target)) == kind for kind, target, _ in options)
    for (target, _), found in zip(jobs, ranks(2).run(judged_together, jobs=jobs, limit_s=110)[0]):
        assert len(found) >= 5 and not problems(found), f"{target}: {problems(found)}"


@pytest.mark.parametrize("name", ALONE)
def test_a_broken_part_is_caught(name: str) -> None:

    arguments, sentence = ALONE[name]
    found = judged(f"{HERE}.{name}", arguments)
    assert re.search(sentence, problems(found)), problems(found)


@cache
def broken_together() -> dict[str, str]:
    """Dispatchers and schedules, all in one go."""
    jobs: list[Any] = [(f"{HERE}.{name}", {}) for name in TOGETHER]
    found = ranks(2).run(judged_together, jobs=jobs, limit_s=110)[0]
    return dict(zip(TOGETHER, map(problems, found)))


@pytest.mark.parametrize("name", TOGETHER)
def test_a_broken_part_on_ranks_is_caught(name: str) -> None:

    assert re.search(TOGETHER[name], broken_together()[name]), broken_together()[name]


@pytest.mark.full
def test_the_schedule_of_the_docs_copied_and_changed_has_a_serial_run() -> None:
    found = ranks(2).run(judged_together, jobs=[(f"{HERE}.Copied", {})])[0][0]
    assert len(found) == 6 and not problems(found), problems(found)
