"""`overlap=shortcut` computes the paper's equations, and puts the experts where they cost least."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sidestream.model.context import PLAIN
from sidestream.model.layers import RMSNorm
from sidestream.model.transformer import MoETransformer
from sidestream.overlap import slots
from sidestream.overlap.shortcut import ShortcutOverlap
from sidestream.overlap.slots import SlotSearch, best_slot
from tests.core.build_tiny import Setup, full, make_model, parallel_for
from tests.overlap.runs import PAIRS
from tests.overlap.transcription import Paper, pair
from tests.rank_pool import ranks

# The transcription computes in fp64 from the same fp32 numbers, so this is the rounding of the model alone, as a
# share of the largest element of an output or a gradient.
TOLERANCE = 1e-6
SEQUENCES, LENGTH = 2, 8


def variants() -> list[tuple[dict[str, Any], int]]:
    """Options of the schedule, and the router's top-k."""
    taps, mixes, norms = (
        ("pos1", "pos2", "pos3"),
        ("add", "cg1", "cg2"),
        itertools.product((False, True), repeat=2),
    )
    switches = [{"tap_norm": tap_norm, "post_norm": post_norm} for tap_norm, post_norm in norms]
    single = [
        ({"tap": tap, "mix": mix, **switch}, top_k)
        for tap, mix, switch in itertools.product(taps, mixes, switches)
        for top_k in (1, 2)
        # Two experts (ScMoE-2) with the authors' norms only.
        if top_k == 1 or switch == {"tap_norm": True, "post_norm": False}
    ]
    double = [({"tap": tap, "double_gating": True, **switch}, 1) for tap in taps for switch in switches]
    return single + double


def build(
    options: dict[str, Any], top_k: int, *, lone: bool = False, shared: bool = True, **sizes: Any
) -> MoETransformer:
    sharing = int(shared and not options.get("double_gating"))
    # Smaller weights than elsewhere: scores of attention that are large enlarge their rounding.
    shape = replace(PAIRS, num_shared_experts=sharing, init_std=0.1)
    if lone:  # an MoE block behind nothing
        shape = replace(shape, num_layers=1, moe_layers=(0,))
    shape = replace(shape, **sizes)
    return make_model(
        Setup(
            dispatcher="local", top_k=top_k, shape=shape, schedule=lambda: ShortcutOverlap(slot=1, **options)
        )
    )


def by_model(model: MoETransformer, h: Tensor, up: Tensor) -> dict[str, Tensor]:
    """Output of the blocks, and gradients: the input's, and the parameters' by name."""
    y = h.requires_grad_()
    contexts = model._contexts(PLAIN, seq_length=LENGTH, device=h.device)
    for unit, context in model.units(contexts):
        y = unit(y, context)
    y.backward(up)
    grads = {name: full(p.grad) for name, p in model.blocks.named_parameters()}
    return {"y": y.detach(), "dh": h.grad, **grads}


def by_paper(
    model: MoETransformer, h: Tensor, up: Tensor, paper: Paper
) -> tuple[dict[str, Tensor], list[list[int]]]:
    """The same by the transcription, and the experts that each token uses."""
    *front, unit = (
        {name: full(p).double().requires_grad_() for name, p in block.named_parameters()}
        for block in model.blocks
    )
    before = front[0] if front else None
    x = h.detach().double().requires_grad_()
    outputs, chosen = zip(*(pair(sequence, unit, before, paper) for sequence in x))
    y = torch.stack(outputs)
    y.backward(up.double())
    grads = {
        f"{i}.{name}": value.grad for i, block in enumerate([*front, unit]) for name, value in block.items()
    }
    return {"y": y.detach(), "dh": x.grad, **grads}, list(itertools.chain(*chosen))


def compare(
    rank: int, world: int, options: dict[str, Any], top_k: int, paper: Paper, **model_options: Any
) -> dict[str, Any]:
    """Relative errors by name; the gate's gradients, ours and the transcription's; the chosen experts."""
    model = build(options, top_k, **model_options)
    generator = torch.Generator().manual_seed(5)
    draw = partial(torch.randn, generator=generator)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):  # all ones would hide a norm in the wrong place
            parameter.data += 0.2 * draw(parameter.shape)
    h, up = (draw(SEQUENCES, LENGTH, 64) for _ in range(2))
    found, (expected, chosen) = by_model(model, h, up), by_paper(model, h, up, paper)
    assert found.keys() == expected.keys()
    gate = f"{len(model.blocks) - 1}.moe.gate"
    return {
        "errors": {name: error(x, expected[name]) for name, x in found.items()},
        "gate": found[gate],
        "paper_gate": expected[gate],
        "chosen": chosen,
        "counts": model.ledger.counts[0].tolist(),
    }


def error(found: Tensor, expected: Tensor | None) -> float:
    """Relative to the norm of what is expected; of a parameter that the equations do not read: all of it."""
    if expected is None:
        return float(found.norm())
    return float((found.double() - expected).norm() / expected.norm())


def paper_of(options: dict[str, Any], top_k: int, **changes: Any) -> Paper:
    names = ("tap", "mix", "double_gating")
    return Paper(**{name: options[name] for name in names if name in options} | {"top_k": top_k} | changes)


def variant_id(value: Any) -> str:
    if isinstance(value, int):
        return f"top{value}"
    return "-".join(key if option is True else str(option) for key, option in value.items() if option)


@pytest.mark.parametrize(("options", "top_k"), variants(), ids=variant_id)
@pytest.mark.sample(12)
def test_outputs_and_gradients_are_those_of_the_equations(options: dict[str, Any], top_k: int) -> None:
    (result,) = ranks(1).run(compare, options=options, top_k=top_k, paper=paper_of(options, top_k))
    worst = max(result["errors"], key=result["errors"].get)
    assert result["errors"][worst] < TOLERANCE, f"{worst}: {result['errors'][worst]}"
    assert result["gate"].abs().max() > 1e-3


@pytest.mark.parametrize(
    ("options", "model_options", "tap"),
    [
        ({"tap": "auto"}, {"lone": True}, "pos1"),
        ({"tap": "pos1", "mix": "cg1"}, {"lone": True}, "pos1"),
        ({"tap": "auto", "double_gating": True}, {"lone": True}, "pos1"),
        ({"tap": "auto"}, {}, "pos2"),
        ({"tap": "pos3"}, {"shared": False}, "pos3"),
    ],
)
def test_auto_reads_inside_a_dense_block_in_front_and_else_the_input(
    options: dict[str, Any], model_options: dict[str, Any], tap: str
) -> None:
    paper = paper_of({**options, "tap": tap}, 1)
    (result,) = ranks(1).run(compare, options=options, top_k=1, paper=paper, **model_options)
    assert max(result["errors"].values()) < TOLERANCE


@pytest.mark.parametrize("tap", ["pos1", "pos2", "pos3"])
@pytest.mark.parametrize(("full", "windows"), [((1,), (3, None)), ((0,), (None, 3))])
def test_each_attention_of_a_pair_has_its_own_window(
    tap: str, full: tuple[int, ...], windows: tuple[int | None, int | None]
) -> None:
    sizes = {"sliding_window": 3, "full_attention_layers": full}
    paper = paper_of({"tap": tap}, 1, windows=windows)
    (result,) = ranks(1).run(compare, options={"tap": tap}, top_k=1, paper=paper, **sizes)
    assert max(result["errors"].values()) < TOLERANCE


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({"tap": "pos1"}, {"tap": "pos2"}),
        ({"tap": "pos2"}, {"tap": "pos3"}),
        ({"tap": "pos3"}, {"tap": "pos1"}),
        ({"tap": "pos2", "mix": "cg1"}, {"mix": "add"}),
        ({"tap": "pos2", "mix": "cg2"}, {"mix": "add"}),
        ({"tap": "pos2", "double_gating": True}, {"double_gating": False}),
        ({"tap": "pos2", "double_gating": True}, {"distinct": False}),
        ({"tap": "pos2"}, {"literal_gate": True}),
    ],
)
def test_no_variant_equals_another(options: dict[str, Any], other: dict[str, Any]) -> None:
    """An option that changed nothing, such as a tap that is stored and not read, would pass unseen."""
    paper = replace(paper_of(options, 1), **other)
    (result,) = ranks(1).run(compare, options=options, top_k=1, paper=paper)
    assert result["errors"]["y"] > 1e-3


def test_top_1_trains_the_router_and_the_literal_equation_would_not() -> None:
    options = {"tap": "pos2"}
    paper = paper_of(options, 1, literal_gate=True)
    (result,) = ranks(1).run(compare, options=options, top_k=1, paper=paper)
    assert result["gate"].abs().max() > 1e-3
    assert result["paper_gate"].abs().max() < 1e-12


def test_the_second_gate_never_takes_the_expert_of_the_first() -> None:
    options = {"tap": "pos2", "double_gating": True}
    ruled, free = (
        ranks(1).run(compare, options=options, top_k=1, paper=paper_of(options, 1, distinct=distinct))[0]
        for distinct in (True, False)
    )
    tokens = SEQUENCES * LENGTH
    assert [len(set(experts)) for experts in ruled["chosen"]] == [2] * tokens
    assert sum(len(set(experts)) == 1 for experts in free["chosen"]) > tokens // 4  # it would, often
    taken = list(itertools.chain(*ruled["chosen"]))
    assert ruled["counts"] == [taken.count(expert) for expert in range(len(ruled["counts"]))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_norms_are_those_of_the_model(dtype: torch.dtype) -> None:
    ours = ShortcutOverlap(post_norm=True).extra(PAIRS)
    model = RMSNorm(PAIRS.hidden_size, eps=PAIRS.norm_eps)
    weight, x = torch.randn(PAIRS.hidden_size), torch.randn(3, PAIRS.hidden_size).to(dtype)
    for norm in (model, *ours.values()):
        norm.weight.data.copy_(weight)
        norm.to(dtype)
    assert ours.keys() == {"tap_norm", "post_norm"}
    assert all(torch.equal(norm(x), model(x)) for norm in ours.values())


# Where the experts are computed.


def mismatch(slot: int, steps: list[float], dispatch: float, combine: float) -> float:
    """Equation 11, for a forward pass and a backward pass whose steps are twice as long."""
    return sum(
        abs(long * sum(steps[:slot]) - dispatch) + abs(long * sum(steps[slot:]) - combine) for long in (1, 2)
    )


def test_best_slot_is_the_argmin_of_equation_11_over_both_passes() -> None:
    draw = random.Random(3)
    chosen = set()
    for _ in range(2000):
        steps = [draw.randrange(64) / 64 for _ in range(draw.randrange(1, 5))]  # sums of these are exact
        dispatch, combine = (draw.randrange(128) / 64 for _ in range(2))
        values = [mismatch(slot, steps, dispatch, combine) for slot in range(len(steps) + 1)]
        slot = best_slot(steps, dispatch=dispatch, combine=combine)
        assert slot == values.index(min(values)), (steps, dispatch, combine)
        chosen.add(slot)
    assert chosen == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("steps", "dispatch", "combine", "slot"),
    [
        ([4.0, 1.0, 2.0], 4.0, 3.0, 1),
        ([4.0, 1.0, 2.0], 5.0, 2.0, 2),
        ([1.0, 1.0], 0.0, 9.0, 0),
        ([1.0, 1.0], 9.0, 0.0, 2),
        ([1.0, 1.0], 0.0, 0.0, 0),  # nothing to hide: the first of equals
        (
            [3.0, 3.0, 1.0],
            10.0,
            10.0,
            1,
        ),  # forward hides all steps anywhere; backward hides all of them from 1 on
    ],
)
def test_best_slot_by_hand(steps: list[float], dispatch: float, combine: float, slot: int) -> None:
    assert best_slot(steps, dispatch=dispatch, combine=combine) == slot


STEPS = ["feed_forward", "attention", "shared"]


def search_slots(rank: int, world: int) -> tuple[dict[str, int], list[int], list[bool]]:
    """Each rank alone would choose another slot; what is decided, used, and whether a pass was measured."""
    search, used, measured = SlotSearch(fixed=None, enabled=True), [], []
    # The second rank computes slowly and its link is slow, too.
    times = [{"feed_forward": 1.0, "attention": 1.0, "shared": 1.0, "dispatch": 0.5, "combine": 3.0}]
    times.append({"feed_forward": 2.0, "attention": 4.0, "shared": 1.0, "dispatch": 6.0, "combine": 0.5})
    for index in range(slots.MEASURED_STEPS + 1):
        for tap, steps in (("pos2", STEPS), ("pos1", STEPS[1:])):
            slot, clock = search.begin(tap, steps, training=True)
            used.append(slot)
            measured.append(clock is not None)
            if clock is not None:
                for name in [*steps, "dispatch", "combine"]:
                    # The first pass is slow: it must not count.
                    clock.seconds[name].append(
                        times[rank][name] * (100.0 if index == 0 and rank == 0 else 1.0)
                    )
        search.end_step(parallel_for(world).control, torch.device("cpu"))
    return search.found, used, measured


def test_the_slots_are_those_of_the_slowest_rank_and_equal_on_all() -> None:
    first, second = ranks(2).run(search_slots)
    assert first == second
    found, used, measured = first
    # Largest over ranks: feed-forward 2, attention 4, shared 1, dispatch 6, combine 3.
    assert found == {
        "pos2": best_slot([2, 4, 1], dispatch=6, combine=3),
        "pos1": best_slot([4, 1], dispatch=6, combine=3),
    }
    assert used == [2, 1] * slots.MEASURED_STEPS + [found["pos2"], found["pos1"]]
    assert measured == [True, True] * slots.MEASURED_STEPS + [False, False]


@pytest.mark.parametrize(
    ("fixed", "enabled", "training"), [(1, True, True), (None, False, True), (None, True, False)]
)
def test_nothing_is_measured_where_nothing_is_decided(
    fixed: int | None, enabled: bool, training: bool
) -> None:
    slot, clock = SlotSearch(fixed=fixed, enabled=enabled).begin("pos2", STEPS, training=training)
    assert clock is None and slot == (2 if fixed is None else fixed)


def test_validation_is_not_measured_and_a_slot_past_the_end_is_the_last() -> None:
    with torch.no_grad():
        assert SlotSearch(fixed=None, enabled=True).begin("pos2", STEPS, training=True)[1] is None
    assert SlotSearch(fixed=3, enabled=True).begin("pos1", STEPS[1:], training=True)[0] == 2
