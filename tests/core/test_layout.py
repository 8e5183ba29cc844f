"""Expert-major order by brute force, on random routes with and without experts."""

import random

import pytest
import torch

from sidestream.dispatch.layout import (
    RowLayout,
    expert_layout,
    max_slots,
    rows_to_slots,
    sum_routes,
    tokens_to_slots,
)
from tests.core.poison import poisoned_memory

CASES = [
    # rows, experts, share of routes to nobody
    (0, 1, 0.0),
    (1, 1, 0.0),
    (1, 4, 1.0),
    (7, 3, 0.3),
    (40, 8, 0.0),
    (40, 8, 0.2),
    (40, 8, 1.0),
    (33, 64, 0.1),
    (200, 5, 0.5),
]


def random_ids(num_rows, num_experts, nobody, seed):
    rng = random.Random(seed)
    favourite = rng.randrange(num_experts)  # skew, so that some experts are busy and others idle

    def draw():
        if rng.random() < nobody:
            return -1
        return favourite if rng.random() < 0.5 else rng.randrange(num_experts)

    return [draw() for _ in range(num_rows)]


def slow_layout(ids, num_experts, alignment, num_slots):
    """The rule, spelled out."""
    row_of_slot, offsets = [], []
    for expert in range(num_experts):
        row_of_slot += [row for row, e in enumerate(ids) if e == expert]
        row_of_slot += [-1] * (-len(row_of_slot) % alignment)
        offsets.append(len(row_of_slot))
    return row_of_slot + [-1] * (num_slots - len(row_of_slot)), offsets


@pytest.mark.parametrize("alignment", [1, 8, 16])
@pytest.mark.parametrize(("num_rows", "num_experts", "nobody"), CASES)
@pytest.mark.parametrize("spare", [0, 5])
def test_layout_equals_the_rule_spelled_out(num_rows, num_experts, nobody, alignment, spare):
    for seed in range(20):
        ids = random_ids(num_rows, num_experts, nobody, seed)
        slots = max_slots(num_rows, num_experts=num_experts, alignment=alignment) + spare
        layout = expert_layout(
            torch.tensor(ids, dtype=torch.int64),
            num_experts=num_experts,
            alignment=alignment,
            num_slots=slots,
        )
        row_of_slot, offsets = slow_layout(ids, num_experts, alignment, slots)
        assert layout.row_of_slot.tolist() == row_of_slot
        assert layout.offsets.tolist() == offsets and layout.offsets.dtype == torch.int32
        assert layout.counts.tolist() == [ids.count(expert) for expert in range(num_experts)]
        # The two maps are inverse to each other and lose no row.
        slot_of_row = layout.slot_of_row.tolist()
        assert [row_of_slot[slot] if slot >= 0 else None for slot in slot_of_row] == [
            row if expert >= 0 else None for row, expert in enumerate(ids)
        ]
        assert sorted(row for row in row_of_slot if row >= 0) == [r for r, e in enumerate(ids) if e >= 0]


@pytest.mark.parametrize("alignment", [1, 8])
def test_a_tight_buffer_is_enough(alignment):
    ids = [2, 0, -1, 2, 2]
    row_of_slot, offsets = slow_layout(ids, 3, alignment, 0)
    layout = expert_layout(torch.tensor(ids), num_experts=3, alignment=alignment, num_slots=offsets[-1])
    assert layout.row_of_slot.tolist() == row_of_slot
    assert offsets[-1] <= max_slots(len(ids), num_experts=3, alignment=alignment)


@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize(("num_rows", "num_experts", "nobody"), CASES)
def test_a_buffer_that_is_too_small_drops_the_end_and_says_what_was_needed(
    num_rows, num_experts, nobody, alignment
):
    for seed in range(5):
        ids = random_ids(num_rows, num_experts, nobody, seed)
        everything, ends = slow_layout(ids, num_experts, alignment, 0)
        for budget in {0, alignment, ends[-1] // 2, max(0, ends[-1] - 1), ends[-1], ends[-1] + 8}:
            layout = expert_layout(
                torch.tensor(ids, dtype=torch.int64),
                num_experts=num_experts,
                alignment=alignment,
                num_slots=budget,
                may_overflow=True,
            )
            kept = (everything + [-1] * budget)[:budget]
            assert layout.row_of_slot.tolist() == kept
            assert layout.slot_of_row.tolist() == [
                kept.index(row) if row in kept else -1 for row in range(num_rows)
            ]
            assert layout.offsets.tolist() == [min(end, budget) for end in ends]
            assert layout.counts.tolist() == [ids.count(expert) for expert in range(num_experts)]
            assert layout.needed == ends[-1] and not layout.every_row and not layout.every_slot


@pytest.mark.parametrize("segment", [7, 9])
def test_segments_of_a_fixed_size(segment):
    ids = [2, 0, -1, 2, 2, 0]
    layout = expert_layout(torch.tensor(ids), num_experts=3, num_slots=3 * segment, segment=segment)
    fill = [-1] * segment
    expected = [1, 5, *fill][:segment] + fill + [0, 3, 4, *fill][:segment]
    assert layout.row_of_slot.tolist() == expected
    assert layout.offsets.tolist() == [segment, 2 * segment, 3 * segment]
    assert layout.counts.tolist() == [2, 0, 3]
    assert layout.slot_of_row.tolist() == [expected.index(row) if row in expected else -1 for row in range(6)]


@pytest.fixture
def nan_memory():
    with poisoned_memory():
        yield


@pytest.mark.parametrize("alignment", [1, 8])
def test_gathers_are_adjoint_and_read_no_row_without_an_expert(alignment, nan_memory):
    generator = torch.Generator().manual_seed(0)
    for seed in range(40):
        tokens, top_k = seed % 6, 1 + seed % 3
        ids = torch.tensor(random_ids(tokens * top_k, 4, 0.3, seed), dtype=torch.int64)
        slots = max_slots(len(ids), num_experts=4, alignment=alignment) + 2
        if seed >= 20:  # too small a buffer
            slots = slots // 2
        layout = expert_layout(
            ids, num_experts=4, alignment=alignment, num_slots=slots, may_overflow=seed >= 20
        )
        slot_of_route = layout.slot_of_row.view(tokens, top_k)
        nobody = (slot_of_route < 0).all(dim=1)

        # Whole numbers: every sum is exact.
        x = torch.randint(-9, 9, (tokens, 3), generator=generator).float()
        x[nobody] = float("nan")
        x.requires_grad_()
        rows = tokens_to_slots(x, layout, top_k=top_k)
        for slot, route in enumerate(layout.row_of_slot.tolist()):
            if slot < layout.offsets[-1]:  # nothing is said about the tail
                assert torch.equal(rows[slot], x[route // top_k] if route >= 0 else torch.zeros(3))
        grad = torch.randint(-9, 9, rows.shape, generator=generator).float()
        grad[layout.row_of_slot < 0] = float("nan")
        rows.backward(grad)
        assert torch.equal(x.grad, sum_routes(grad, layout, top_k=top_k))

        back = torch.randint(-9, 9, (slots, 3), generator=generator).float()
        back[layout.row_of_slot < 0] = float("nan")
        back.requires_grad_()
        y = sum_routes(back, layout, top_k=top_k)
        zero = torch.zeros(3)
        for token, routes in enumerate(slot_of_route.tolist()):
            assert torch.equal(y[token], sum((back[slot] for slot in routes if slot >= 0), zero))
        grad = torch.randint(-9, 9, y.shape, generator=generator).float()
        y.backward(grad)
        end = layout.offsets[-1]
        assert torch.equal(back.grad[:end], tokens_to_slots(grad, layout, top_k=top_k)[:end])


def test_rows_go_to_their_slots_and_gradients_come_back():
    ids = torch.tensor([1, -1, 0, 1])
    layout = expert_layout(ids, num_experts=2, alignment=4, num_slots=10)
    x = torch.tensor([[1.0], [float("nan")], [3.0], [4.0]], requires_grad=True)
    y = rows_to_slots(x, layout)
    assert y[:8].flatten().tolist() == [3.0, 0.0, 0.0, 0.0, 1.0, 4.0, 0.0, 0.0]
    grad = torch.arange(10.0).unsqueeze(1)
    grad[8:] = float("nan")
    y.backward(grad)
    assert x.grad.flatten().tolist() == [4.0, 0.0, 0.0, 5.0]


def test_rows_without_a_slot_are_zero_whatever_lies_in_the_slots():
    layout = expert_layout(torch.tensor([-1, -1]), num_experts=2, num_slots=3)
    nothing = torch.full((3, 1), float("nan"), requires_grad=True)
    x = torch.ones(2, 1, requires_grad=True)
    rows_to_slots(x, layout).backward(nothing)
    assert x.grad.tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("every_row", [False, True])
def test_sum_over_routes_is_fp32(every_row):
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)  # 256 + 1 is 256 in bf16
    index = torch.arange(3)
    layout = RowLayout(
        index, index, counts=index, offsets=index, needed=index.new_tensor(3), every_row=every_row
    )
    y = sum_routes(rows, layout, top_k=3)
    assert y.dtype == torch.bfloat16 and y.item() == 258.0


def test_knowing_that_nothing_is_missing_changes_no_number():
    ids = torch.tensor([2, 0, 1, 2, 0, 0])
    x = torch.randn(3, 4)
    layouts = [expert_layout(ids, num_experts=3, alignment=1, num_slots=6, complete=c) for c in (False, True)]
    assert [(layout.every_slot, layout.every_row) for layout in layouts] == [(False, False), (True, True)]
    slots = [tokens_to_slots(x, layout, top_k=2) for layout in layouts]
    assert torch.equal(*slots)
    sums = [sum_routes(rows, layout, top_k=2) for rows, layout in zip(slots, layouts)]
    assert torch.equal(*sums)
    assert torch.equal(sums[0], 2 * x)


# sums of bf16


def test_sums_are_rounded_to_the_nearest_even_number():
    rows = torch.tensor([[256.0], [1.0], [258.0], [3.0], [-256.0], [-1.0]]).repeat(1, 16).bfloat16()
    layout = expert_layout(torch.tensor([0, 1, 2, 1, 0, 2]), num_experts=3, num_slots=6, complete=True)
    for top_k, expected in ((2, [256.0, 260.0, -256.0]), (3, [516.0, -254.0])):
        # Rows of slots in the order of the experts, so that each token gets its own rows back.
        slots = rows_to_slots(rows, layout)
        assert sum_routes(slots, layout, top_k=top_k)[:, 0].tolist() == expected
        x = torch.zeros(6 // top_k, 16, dtype=torch.bfloat16, requires_grad=True)
        tokens_to_slots(x, layout, top_k=top_k).backward(slots)
        assert x.grad[:, 0].tolist() == expected


@pytest.mark.parametrize("nobody", [0.0, 0.4])
@pytest.mark.parametrize("top_k", [1, 2, 5])
@pytest.mark.parametrize("hidden", [1, 40, 2**18 + 8])
def test_sums_of_bf16_are_those_of_fp32_rounded_once(hidden, top_k, nobody):
    tokens = 3 if hidden > 1000 else 30
    ids = torch.tensor(random_ids(tokens * top_k, 5, nobody, seed=top_k), dtype=torch.int64)
    layout = expert_layout(ids, num_experts=5, num_slots=len(ids), complete=nobody == 0)
    # Whole numbers, many of whose sums lie in the middle between two numbers of bf16.
    rows = torch.randint(-600, 600, (len(ids), hidden), generator=torch.Generator().manual_seed(0)).bfloat16()
    rows[int((ids >= 0).sum()) :] = float("nan")  # past the last offset
    wide = torch.where((layout.slot_of_row < 0).unsqueeze(1), 0.0, rows.float()[layout.slot_of_row])
    total = torch.zeros(tokens, hidden)
    for k in range(top_k):
        total += wide.view(tokens, top_k, hidden)[:, k]
    assert torch.equal(sum_routes(rows, layout, top_k=top_k), total.bfloat16())
