"""Every schedule computes the same numbers overlapped, serial, with late weight gradients and from any slot.

Bit for bit, in every combination, under pauses that shift the ranks against each other.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from sidestream.overlap.chunked import ChunkedOverlap
from sidestream.overlap.shared_expert import SharedExpertOverlap
from sidestream.overlap.two_batch import TwoBatchOverlap
from tests.core.build_tiny import Setup, make_model
from tests.core.pairwise import Row, pairwise
from tests.overlap.runs import CASES, MORE_CASES, PAUSE_S, Case, differences, train
from tests.rank_pool import ranks

ALL_CASES = CASES | MORE_CASES
DISPATCHERS = ("alltoall", "allgather", "nccl_ep", "deep_ep")


def rows_of(cases: dict[str, Case]) -> list[Row]:
    """Case, dispatcher, static, reduction, autocast, recompute, expert-parallel size, delay_wgrad."""
    flags = (False, True)
    every = product(cases, DISPATCHERS, flags, ("replicate", "fully_shard"), flags, flags, (1, 2), flags)
    return [
        row
        for row in every
        if not (row[7] and row[3] == "fully_shard")  # refused by the check of the config
        and not (row[6] == 1 and row[1] != "alltoall")  # nothing travels
    ]


def setup_of(row: Row, *, deep: bool = False) -> tuple[Case, Setup]:
    name, dispatcher, static, reduction, autocast, recompute, ep, _ = row
    case = ALL_CASES[name]
    if deep:
        case = case.deep()
    setup = case.setup(
        dispatcher=dispatcher,
        capacity_factor=1.0 if static else None,
        reduction=reduction,
        autocast=autocast,
        recompute=recompute,
        ep=ep,
    )
    return case, setup


@cache
def serial(case: Case, setup: Setup) -> list[dict[str, Any]]:
    """The same schedule with every transfer waited for where it starts."""
    return ranks(2).run(train, setup=setup.with_(schedule=partial(case.make, enabled=False)))


@cache
def plain(setup: Setup) -> list[dict[str, Any]]:
    """Without overlap."""
    return ranks(2).run(train, setup=setup)


def check_row(row: Row, *, pause_s: float, deep: bool = False) -> None:
    case, setup = setup_of(row, deep=deep)
    delayed = setup.with_(schedule=partial(case.make, delay_wgrad=row[7]))
    overlapped = ranks(2).run(train, setup=delayed, pause_s=pause_s)
    assert overlapped[0]["tags"] == overlapped[1]["tags"]
    for one, other in zip(overlapped, serial(case, setup)):
        assert differences(one, other) == []
        assert forward_tags(one) == forward_tags(other)
        assert sorted(one["tags"]) == sorted(other["tags"])
    if row[0].startswith("shared_expert"):
        for one, other in zip(overlapped, plain(setup)):
            assert differences(one, other) == []


def forward_tags(run: dict[str, Any]) -> list[str]:
    return [tag for tag in run["tags"] if not tag.endswith(".backward")]


def row_id(row: Row) -> str:
    name, dispatcher, static, reduction, autocast, recompute, ep, late = row
    sizes = ["static" if static else "eager", reduction, "bf16" if autocast else "fp32", f"ep{ep}"]
    return "-".join([name, dispatcher, *sizes, *["recompute"] * recompute, *["late"] * late])


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=pytest.mark.full if number % 2 else (), id=row_id(row))
        for number, row in enumerate(pairwise(rows_of(CASES)))
    ],
)
@pytest.mark.sample(5)
def test_overlapped_and_late_equal_serial_and_shared_expert_equals_none(row: Row) -> None:
    check_row(row, pause_s=PAUSE_S)


def test_without_a_shared_expert_every_parameter_still_gets_a_gradient() -> None:
    """Under `fully_shard` one without is an error."""
    check_row(("no_shared_expert", "alltoall", False, "fully_shard", False, False, 2, False), pause_s=0.0)


@pytest.mark.full
@pytest.mark.parametrize("name", ALL_CASES)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.timeout(900)
def test_every_combination_equals_serial(name: str, dispatcher: str) -> None:
    # Late wherever it can be: without is in the sample, as are long pauses. Here, units follow one another.
    rows = [
        row
        for row in rows_of({name: ALL_CASES[name]})
        if row[1] == dispatcher and row[7] == (row[3] == "replicate")
    ]
    # All of them would take half an hour: every sixteenth, others for each schedule and dispatcher.
    first = (list(ALL_CASES).index(name) + list(DISPATCHERS).index(dispatcher)) % min(16, len(rows))
    for row in rows[first::16]:
        check_row(row, pause_s=0.1 * PAUSE_S, deep=True)
    serial.cache_clear()
    plain.cache_clear()


# Chunks and halves change the number of rows of a matrix product, and with it the order of sums over features in the
# CPU's GEMM and over tokens in weight gradients: fp32 rounding, relative to the largest gradient of a parameter.
ROUNDING = 1e-5


SETTINGS: dict[str, dict[str, Any]] = {
    "nccl_ep": {"dispatcher": "nccl_ep"},
    "padded": {
        "balance": "aux_micro_batch_strong",
        "padded": True,
        "dispatcher": "deep_ep",
        "capacity_factor": 1.0,
    },
    "sharded": {"balance": "aux_global_z", "reduction": "fully_shard"},
    "quantile": {"balance": "quantile", "fusion": "loop", "padded": True},
    "sigmoid": {"balance": "bias", "router": "sigmoid_groups", "top_k": 4},
    # A capacity is a share of the tokens routed together: refused for halves.
    "capacity": {"router": "capacity"},
    "capacity_padded": {"router": "capacity_padded", "balance": "none_z"},
}


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("chunked_2", "nccl_ep"),
        *product(["chunked"], SETTINGS),
        *product(["two_batch"], [name for name in SETTINGS if not name.startswith("capacity")]),
    ],
)
@pytest.mark.sample(5)
def test_chunks_and_halves_equal_none_but_for_rounding(name: str, setting: str) -> None:
    case = ALL_CASES[name]
    # Dropout and jitter would draw other numbers; AdamW would turn rounding near zero into a whole step.
    setup = case.setup(
        **{"dropout": 0.0, "router": "softmax", "ep": 2, "optimizer": "sgd", **SETTINGS[setting]}
    )
    runs = ranks(2).run(train, setup=setup.with_(schedule=case.make)), ranks(2).run(train, setup=setup)
    for one, other in zip(*runs):
        assert one["loss"] == pytest.approx(other["loss"], rel=ROUNDING)
        assert one["norm"] == pytest.approx(other["norm"], rel=ROUNDING)
        assert all(torch.equal(*pair) for pair in zip(one["counts"], other["counts"]))
        for kind in ("grads", "params"):
            for parameter, value in other[kind].items():
                atol = ROUNDING * value.abs().max().item()
                torch.testing.assert_close(one[kind][parameter], value, rtol=0, atol=atol, msg=parameter)


def test_any_slot_gives_the_same_bits() -> None:
    case = CASES["pos3_cg2"]
    setup = case.setup(ep=2, dispatcher="nccl_ep", steps=3)
    slots = [0, 1, 2, 3, 4, "auto"]
    runs = [ranks(2).run(train, setup=setup.with_(schedule=partial(case.make, slot=slot))) for slot in slots]
    for run in runs[1:]:
        for one, other in zip(run, runs[0]):
            assert differences(one, other) == []
            assert forward_tags(one) == forward_tags(other)
    assert runs[-1][0]["slots"] == runs[-1][1]["slots"] and runs[-1][0]["slots"].keys() == {"pos3"}


@pytest.mark.parametrize(
    ("name", "reduction", "late"),
    [
        *((name, "replicate", True) for name in CASES),
        *((n, "fully_shard", False) for n in ("chunked", "pos1")),
    ],
)
@pytest.mark.sample(3)
def test_a_rank_without_tokens_changes_no_order(name: str, reduction: str, late: bool) -> None:
    """Every token to the experts of rank 0, or rank 1 with padding alone: neither shows in the exchanges."""
    case = CASES[name]
    options = {"ep": 2, "balance": "bias", "steps": 1, "recompute": True, "reduction": reduction}
    setup = case.setup(**options, schedule=partial(case.make, delay_wgrad=late))
    even = ranks(2).run(train, setup=setup)
    skewed = ranks(2).run(train, setup=setup, pause_s=PAUSE_S, skew=100.0)
    idle = ranks(2).run(train, setup=setup.with_(padded=True), pause_s=PAUSE_S)
    assert all(run["tags"] == even[0]["tags"] for run in [*even, *skewed, *idle])
    first = setup.shape.num_experts // 2
    assert not skewed[0]["counts"][0][:, first:].any() and even[0]["counts"][0].all()
    # The gradients of experts without rows are those of the serial run: zeros.
    serially = setup.with_(schedule=partial(case.make, enabled=False))
    for one, other in zip(skewed, ranks(2).run(train, setup=serially, skew=100.0)):
        assert differences(one, other) == []
    experts = [grad for parameter, grad in skewed[0]["grads"].items() if ".experts." in parameter]
    assert all(grad[:first].any() and not grad[first:].any() for grad in experts)


def answers(
    rank: int, world: int, make: Any, setup: Setup, sizes: list[tuple[int, int]]
) -> dict[tuple[int, int], list[Tensor]]:
    """Logits without a graph, serial and overlapped, for batches of so many sequences of so many tokens."""
    found: dict[tuple[int, int], list[Tensor]] = {size: [] for size in sizes}
    for enabled in (False, True):
        model = make_model(setup.with_(schedule=partial(make, enabled=enabled))).eval()
        generator = torch.Generator().manual_seed(rank)
        for size in sizes:
            tokens = torch.randint(0, setup.shape.vocab_size, size, generator=generator)
            with torch.inference_mode():
                found[size].append(model(tokens).clone())
        model.parts.dispatcher.close()
    return found


@pytest.mark.parametrize("name", CASES)
def test_evaluation_takes_single_sequences_and_fewer_tokens_than_chunks(name: str) -> None:
    case = CASES[name]
    sizes = [(1, 1), (1, 2), (3, 5)]
    for world, ep, dispatcher in ((1, 1, "local"), (2, 2, "deep_ep")):
        setup = case.setup(ep=ep, dispatcher=dispatcher)
        for result in ranks(world).run(answers, make=case.make, setup=setup, sizes=sizes):
            for serially, overlapped in result.values():
                assert torch.equal(serially, overlapped) and overlapped.isfinite().all()


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 8])
@pytest.mark.parametrize("padding", [0, 5])
def test_a_plan_never_has_more_tokens_than_announced(num_sequences: int, padding: int) -> None:
    """Buffers of static dispatchers are sized by it."""
    rows = num_sequences * 7 + padding
    for num_chunks in (1, 2, 3, 5, 100):
        announced = ChunkedOverlap(num_chunks=num_chunks).tokens_per_plan(num_sequences, 7, padding=padding)
        assert announced == max(len(chunk) for chunk in torch.zeros(rows).tensor_split(num_chunks))
    half = max(len(part) for part in torch.zeros(num_sequences).tensor_split(2))
    assert TwoBatchOverlap().tokens_per_plan(num_sequences, 7, padding=padding) == half * 7 + padding
    assert SharedExpertOverlap().tokens_per_plan(num_sequences, 7, padding=padding) == rows
