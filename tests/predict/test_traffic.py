"""Bytes: against counting them, and what must hold whatever the sizes are."""

from __future__ import annotations

import random

import pytest

from sidestream.predict.traffic import Legs, Routes, destinations, legs, row_bytes, rows_sent

SIZES = [
    (Routes(8, 2), 2),
    (Routes(64, 8), 8),
    (Routes(256, 8), 16),
    (Routes(128, 8), 1),
    (Routes(256, 8, 8, 4), 8),  # a group is a rank
    (Routes(256, 8, 8, 4), 32),  # a rank is a quarter of a group
    (Routes(256, 8, 8, 4), 4),  # a rank is two groups
    (Routes(32, 8, 8, 4), 8),
    (Routes(16, 1, 4, 2), 16),
    (Routes(96, 1, 8, 4), 6),  # ranks that hold parts of groups
    (Routes(96, 8, 8, 4), 6),
    (Routes(384, 8, 8, 4), 12),
]


def counted(routes: Routes, parts: int, *, draws: int = 4000) -> float:
    """Distinct parts of a token's experts, by drawing."""
    draw, found = random.Random(0), 0
    size = routes.num_experts // routes.num_groups
    for _ in range(draws):
        kept = draw.sample(range(routes.num_groups), routes.top_groups)
        reachable = [group * size + i for group in kept for i in range(size)]
        chosen = draw.sample(reachable, routes.top_k)
        found += len({expert * parts // routes.num_experts for expert in chosen})
    return found / draws


@pytest.mark.parametrize(("routes", "parts"), SIZES)
def test_destinations_are_what_drawing_gives(routes: Routes, parts: int) -> None:
    assert destinations(routes, parts) == pytest.approx(counted(routes, parts), rel=0.02)


def test_destinations_by_hand() -> None:
    # Two experts of eight, two ranks: both on one rank in 2 * C(4, 2) of C(8, 2) = 28 cases.
    assert destinations(Routes(8, 2), 2) == pytest.approx(2 - 12 / 28)
    assert destinations(Routes(8, 1), 8) == pytest.approx(1)
    assert destinations(Routes(8, 8), 8) == pytest.approx(8)
    assert destinations(Routes(96, 1, 8, 4), 6) == pytest.approx(1)


def some(draw: random.Random) -> tuple[Routes, int, int]:
    """Routes, ranks, ranks of a domain."""
    ranks = 2 ** draw.randrange(1, 8)
    routes = Routes(ranks * 2 ** draw.randrange(3), draw.randrange(1, 9))
    if routes.num_experts < routes.top_k:
        routes = Routes(8 * ranks, routes.top_k)
    if draw.random() < 0.3 and routes.num_experts >= 64:
        routes = Routes(routes.num_experts, min(routes.top_k, 8), 8, 4)
    return routes, ranks, 2 ** draw.randrange(0, 7)


def sent(packing: str, routes: Routes, ranks: int, domain: int, tokens: int = 100, row: float = 64.0) -> Legs:
    return legs(packing, routes, tokens=tokens, ranks=ranks, per_domain=domain, row=row)  # type: ignore[arg-type]


def test_dedup_never_sends_more() -> None:
    draw = random.Random(1)
    for _ in range(500):
        routes, ranks, domain = some(draw)
        plain, rank, node = (sent(p, routes, ranks, domain) for p in ("per_route", "per_rank", "per_node"))
        everything = sent("to_all", routes, ranks, domain)
        slack = 1 + 1e-9
        assert rank.fast + rank.slow <= (plain.fast + plain.slow) * slack
        assert rank.fast + rank.slow <= (everything.fast + everything.slow) * slack
        assert node.slow <= rank.slow * slack <= plain.slow * slack**2
        # A row that arrives once per domain is handed on inside it.
        assert node.fast + node.slow >= rank.fast / slack


def test_bytes_grow_with_tokens_and_with_what_a_row_has() -> None:
    draw = random.Random(2)
    for _ in range(200):
        routes, ranks, domain = some(draw)
        for packing in ("per_route", "per_rank", "per_node", "to_all"):
            less, more = (
                sent(packing, routes, ranks, domain),
                sent(packing, routes, ranks, domain, tokens=101),
            )
            wider = sent(packing, routes, ranks, domain, row=65.0)
            assert more.fast >= less.fast and more.slow >= less.slow
            assert wider.fast >= less.fast and wider.slow >= less.slow


def test_bytes_of_a_rank_are_those_of_the_formulas() -> None:
    # The table of the reference: T K b (R-1)/R;  T R p b (per-1)/per;  T N p b (N-1)/N;  T b.
    routes = Routes(256, 8)
    plain = sent("per_route", routes, 16, 8)
    assert (plain.fast, plain.slow) == pytest.approx((100 * 8 * 64 * 7 / 16, 100 * 8 * 64 * 8 / 16))
    node = sent("per_node", routes, 16, 8)
    assert node.fast == pytest.approx(100 * destinations(routes, 16) * 64 * 7 / 8)
    assert node.slow == pytest.approx(100 * destinations(routes, 2) * 64 / 2)
    gathered = sent("to_all", routes, 16, 8)
    assert gathered.fast + gathered.slow == pytest.approx(100 * 15 * 64)
    assert rows_sent("to_all", routes, tokens=100, ranks=16) == 1600


def test_bytes_that_a_real_run_printed() -> None:
    """AWS, DeepEP V2 on two and four nodes of eight: 4096 tokens, hidden 7168, top-8 of 256, bf16, own part left out.

    Ids and weights are in the printed sums.
    """
    for nodes, fast, slow in ((2, 337.5e6, 58.5e6), (4, 375.6e6, 161.4e6)):
        found = legs(
            "per_node",
            Routes(256, 8),
            tokens=4096,
            ranks=8 * nodes,
            per_domain=8,
            row=row_bytes(7168, "bf16"),
        )
        assert found.slow == pytest.approx(slow, rel=0.02)
        assert found.fast == pytest.approx(fast, rel=0.01)


def test_rows_of_each_wire() -> None:
    assert [row_bytes(7168, wire) for wire in ("fp32", "bf16", "fp8", "mxfp8")] == [28672, 14336, 7392, 7392]
