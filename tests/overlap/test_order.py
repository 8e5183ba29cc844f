"""What is under way while something is computed, in both passes: overlap can be lost without a wrong number.

The logs come from the hooks of the exchange and of the modules, so they hold whatever a schedule really did.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from sidestream.fusion.late import Late
from sidestream.model.block import MoEUnit
from sidestream.overlap.chunked import ChunkedOverlap
from sidestream.overlap.none import NoOverlap
from sidestream.overlap.path import RoutedPath
from sidestream.overlap.shared_expert import SharedExpertOverlap
from sidestream.overlap.shortcut import ShortcutOverlap
from sidestream.overlap.two_batch import TwoBatchOverlap
from tests.core.build_tiny import Setup, local_batch, make_model
from tests.overlap.runs import PAIRS
from tests.rank_pool import ranks

ROWS = ("dispatch", "combine", "dispatch.backward", "combine.backward")
Log = list[str]
Trace = list[tuple[str, list[str]]]


def traces(rank: int, world: int, setup: Setup, *, serial_path: bool = False) -> tuple[Log, Log, float]:
    """Logs of forward and of backward of one micro-batch, and its loss.

    A log has "start <tag>", "wait <tag>", what is computed, and "reduce <weight>" where hooks reduce its gradient.

    Args:
        rank, world: This rank.
        setup: The model.
        serial_path: Overlap is lost: whatever the schedule asks for, a transfer is waited for where it starts.
    """
    model = make_model(setup)
    log: Log = []
    channel = model.parts.dispatcher.channel
    channel.on_start = lambda tag: log.append(f"start {tag}")
    channel.on_wait = lambda tag: log.append(f"wait {tag}")
    before, unit = model.blocks
    assert isinstance(unit, MoEUnit)
    shared = unit.moe.shared_expert
    work = {
        "attention_before": before.self_attention,
        "feed_forward": before.ffn,
        "attention": unit.self_attention,
    }
    work |= {"experts": unit.moe.experts}
    work |= {} if shared is None else {"shared_up": shared.gate_up, "shared_down": shared.down}
    for name, module in work.items():
        module.register_forward_hook(partial(note, log, name))
    for name, parameter in unit.moe.experts.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: log.append(f"reduce {name}"))
    compute, init = Late.compute, RoutedPath.__init__

    def logged(late: Late) -> torch.Tensor:
        log.append("wgrad")
        return compute(late)

    def at_once(path: RoutedPath, *args: Any, **options: Any) -> None:
        init(path, *args, **{**options, "serial": True})

    with mock.patch.object(Late, "compute", logged):
        with mock.patch.object(RoutedPath, "__init__", at_once if serial_path else init):
            loss = model.loss_sums(local_batch(setup, 0, rank, world)).nll
        forward = list(log)
        log.clear()
        loss.backward()
    model.parts.dispatcher.close()
    return forward, log, loss.item()


def note(log: Log, name: str, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
    log.append(name)
    # Called when the backward of what made the output begins.
    output.register_hook(lambda _: log.append(name))


def hidden(log: Log) -> Trace:
    """Everything computed, in order, with the transfers of rows under way meanwhile."""
    flying: Counter[str] = Counter()
    found: Trace = []
    for event in log:
        action, _, tag = event.partition(" ")
        if action in ("start", "wait"):
            if tag in ROWS:
                flying[tag] += 1 if action == "start" else -1
        elif action != "reduce":
            found.append((event, sorted(flying.elements())))
    assert not any(flying.values()), "a transfer was not waited for"
    return found


def check_traces(logs: list[tuple[Log, Log, float]], forward: Trace, backward: Trace) -> None:
    """The property that the schedules exist for."""
    for of_forward, of_backward, _ in logs:
        assert hidden(of_forward) == forward
        assert hidden(of_backward) == backward
    assert logs[0][:2] == logs[1][:2]


D, C, DB, CB = (("dispatch",), ("combine",), ("dispatch.backward",), ("combine.backward",))


def trace(text: str, **under_way: tuple[str, ...]) -> Trace:
    """`"experts:DC"` -> experts computed with a dispatch and a combine under way."""
    words = [word.partition(":") for word in text.split()]
    return [
        (name, sorted(tag for letter in flying for tag in under_way[letter])) for name, _, flying in words
    ]


forward, backward = partial(trace, D=D, C=C), partial(trace, D=DB, C=CB)
_pair = "attention_before feed_forward attention"
_back = "attention feed_forward attention_before"
EXPECTED: dict[str, tuple[Any, Trace, Trace]] = {
    "shared_expert": (
        SharedExpertOverlap,
        forward(f"{_pair} shared_up:D experts shared_down:C"),
        backward(f"shared_down:C experts shared_up:D {_back}"),
    ),
    "chunked": (
        partial(ChunkedOverlap, num_chunks=3),
        forward(f"{_pair} experts:DD experts:DC experts:CC shared_up:CCC shared_down:CCC"),
        backward(f"shared_down:CCC shared_up:CCC experts:CC experts:DC experts:DD {_back}"),
    ),
    "two_batch": (
        TwoBatchOverlap,
        forward(
            "attention_before feed_forward attention attention:D experts:D experts:C "
            "shared_up:CC shared_down:CC shared_up:CC shared_down:CC"
        ),
        backward(
            "shared_down:CC shared_up:CC shared_down:CC shared_up:CC experts:C experts:D "
            "attention:D attention feed_forward attention_before"
        ),
    ),
    "pos1": (
        partial(ShortcutOverlap, tap="pos1", slot=1),
        forward("attention_before feed_forward attention:D experts shared_up:C shared_down:C"),
        backward("shared_down:C shared_up:C experts attention:D feed_forward attention_before"),
    ),
    "pos2": (
        partial(ShortcutOverlap, tap="pos2", slot=2),
        forward("attention_before feed_forward:D attention:D experts shared_up:C shared_down:C"),
        backward("shared_down:C shared_up:C experts attention:D feed_forward:D attention_before"),
    ),
    "pos3": (
        partial(ShortcutOverlap, tap="pos3", slot=2),
        forward("attention_before:D feed_forward:D experts attention:C shared_up:C shared_down:C"),
        backward("shared_down:C shared_up:C attention:C experts feed_forward:D attention_before:D"),
    ),
    "pos3_first": (
        partial(ShortcutOverlap, tap="pos3", slot=0),
        forward("experts attention_before:C feed_forward:C attention:C shared_up:C shared_down:C"),
        backward("shared_down:C shared_up:C attention:C feed_forward:C attention_before:C experts"),
    ),
    "pos3_last": (
        partial(ShortcutOverlap, tap="pos3", slot=4),
        forward("attention_before:D feed_forward:D attention:D shared_up:D shared_down:D experts"),
        backward("experts shared_down:D shared_up:D attention:D feed_forward:D attention_before:D"),
    ),
    "double_gating": (
        partial(ShortcutOverlap, double_gating=True, slot=1),
        forward("attention_before feed_forward:D experts attention:C experts"),
        backward("experts attention:C experts feed_forward:D attention_before"),
    ),
}


def setup_for(name: str, **options: Any) -> Setup:
    gates = 2 if name == "double_gating" else 1
    shape = replace(PAIRS, num_shared_experts=2 - gates)
    make = partial(EXPECTED[name][0], **options)
    return Setup(ep=2, dispatcher="nccl_ep", shape=shape, top_k=3 - gates, schedule=make)


@pytest.mark.parametrize("name", EXPECTED)
def test_transfers_hide_what_the_schedule_says_in_both_passes(name: str) -> None:
    _, of_forward, of_backward = EXPECTED[name]
    check_traces(ranks(2).run(traces, setup=setup_for(name)), of_forward, of_backward)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_path_that_waits_at_once_is_noticed_though_its_numbers_are_right(name: str) -> None:
    _, of_forward, of_backward = EXPECTED[name]
    good, bad = (ranks(2).run(traces, setup=setup_for(name), serial_path=serial) for serial in (False, True))
    assert [loss for *_, loss in good] == [loss for *_, loss in bad]
    with pytest.raises(AssertionError, match=r"dispatch|combine"):
        check_traces(bad, of_forward, of_backward)


@pytest.mark.parametrize("name", EXPECTED)
def test_disabled_and_none_hide_nothing(name: str) -> None:
    for setup in (setup_for(name, enabled=False), setup_for(name).with_(schedule=NoOverlap)):
        for log in ranks(2).run(traces, setup=setup)[0][:2]:
            assert not any(under_way for _, under_way in hidden(log))


@pytest.mark.parametrize("name", EXPECTED)
def test_late_weight_gradients_are_computed_while_the_rows_gradient_travels(name: str) -> None:
    _, of_forward, of_backward = EXPECTED[name]
    now, late = (ranks(2).run(traces, setup=setup_for(name, delay_wgrad=flag))[0] for flag in (False, True))
    assert hidden(late[0]) == of_forward
    computed = hidden(late[1])
    assert [entry for entry in computed if entry[0] != "wgrad"] == of_backward
    for index, (what, _) in enumerate(computed):
        if (
            what == "experts"
        ):  # next come the gradients of its two weights, behind the start of the rows' way back
            names, flying = zip(*computed[index + 1 : index + 3])
            assert names == ("wgrad", "wgrad")
            assert all("dispatch.backward" in transfers for transfers in flying)
    # Hooks that reduce fire once per weight, at once after the last part of its gradient; without delay, before.
    log = late[1]
    last = len(log) - 1 - log[::-1].index("wgrad")
    assert log[last - 2 : last + 2] == ["wgrad", "reduce w_down", "wgrad", "reduce w_gate_up"]
    assert [event for event in log if event.startswith("reduce")] == ["reduce w_down", "reduce w_gate_up"]
    last_start = len(now[1]) - 1 - now[1][::-1].index("start dispatch.backward")
    assert now[1].index("reduce w_gate_up") < last_start < last


def test_the_shared_expert_is_computed_between_start_and_wait() -> None:
    """Of the dispatch in forward, and of the combine in backward."""
    of_forward, of_backward, _ = ranks(2).run(traces, setup=setup_for("shared_expert"))[0]
    start, shared, wait = (of_forward.index(e) for e in ("start dispatch", "shared_up", "wait dispatch"))
    assert start < shared < wait
    start, shared, wait = (
        of_backward.index(e) for e in ("start combine.backward", "shared_down", "wait combine.backward")
    )
    assert start < shared < wait
