"""Rows that the experts compute: how many of them are padding."""

import pytest
import torch

from sidestream.dispatch.layout import max_slots
from sidestream.fusion.base import resolve_alignment
from sidestream.overlap.path import RoutedPath
from tests.core.build_tiny import DISPATCHERS, FUSIONS, parallel_for
from tests.core.scale_experts import routing_of, run_path, wire
from tests.rank_pool import ranks

COUNTS = [13, 1, 1, 1]
IDS = [[e] for e, count in enumerate(COUNTS) for _ in range(count)]


@pytest.mark.parametrize(("alignment", "rows"), [(1, 16), (8, 40)])
@pytest.mark.parametrize("name", DISPATCHERS)
def test_experts_are_not_padded_to_the_busiest(name, alignment, rows):
    dispatcher = wire(name, num_experts=4, alignment=alignment)
    plan = dispatcher.plan(routing_of(IDS))
    received = dispatcher.dispatch(torch.ones(16, 1), plan).wait()
    assert received.offsets[-1] == rows
    assert received.row_weights[:rows].count_nonzero() == received.rows[:rows].count_nonzero() == 16
    # One rank reads no sizes: a bound that depends on the total alone.
    assert plan.rows() == len(received.rows) == 16 + 4 * (alignment - 1)
    dispatcher.close()


def rows_on_two_ranks(rank, world, name, alignment):
    """Rows of the expert GEMM when each rank has half of the routes."""
    dispatcher = wire(name, num_experts=4, alignment=alignment, group=parallel_for(world).ep_group)
    plan = dispatcher.plan(routing_of(IDS[rank::world]))
    received = dispatcher.dispatch(torch.ones(8, 1), plan).wait()
    dispatcher.combine(received.rows, plan).wait()
    dispatcher.close()
    return len(received.rows), received.exact, int(received.offsets[-1])


@pytest.mark.parametrize(("alignment", "rows"), [(1, [14, 2]), (8, [24, 16])])
@pytest.mark.parametrize("name", [name for name in DISPATCHERS if name != "local"])
def test_ranks_size_their_buffers_by_their_own_rows(name, alignment, rows):
    found = ranks(2).run(rows_on_two_ranks, name=name, alignment=alignment)
    assert found == [(n, True, n) for n in rows]


def test_bound_of_rows_does_not_depend_on_the_imbalance():
    assert max_slots(16, num_experts=4, alignment=8) == 16 + 4 * 7
    assert max_slots(2, num_experts=64, alignment=8) == 16  # two rows reach two experts at most
    assert max_slots(0, num_experts=4, alignment=8) == 0


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize("name", DISPATCHERS)
def test_alignment_does_not_change_the_output(name, fusion):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 32, generator=generator)
    weights = [torch.randn(4, 32, n, generator=generator, requires_grad=True) for n in (64, 32)]

    def run(alignment):
        dispatcher = wire(name, num_experts=4, hidden=32, alignment=alignment)
        path = RoutedPath(
            x,
            routing_of(IDS),
            dispatcher=dispatcher,
            experts=lambda received: FUSIONS[fusion]()(received, *weights),
        )
        y = run_path(path)
        grads = torch.autograd.grad(y.square().mean(), weights)
        dispatcher.close()
        return y, *grads

    for aligned, plain in zip(run(8), run(1)):
        # The GEMM library rounds a lone row and zero rows in a sum differently: 2e-7 of the largest entry seen.
        assert (aligned - plain).abs().max() <= 2e-6 * plain.abs().max()


def test_automatic_alignment_is_for_bf16_on_a_cpu():
    assert resolve_alignment("auto", dtype=torch.bfloat16, device_type="cpu") == 16
    assert resolve_alignment("auto", dtype=torch.float32, device_type="cpu") == 1
    assert resolve_alignment("auto", dtype=torch.bfloat16, device_type="cuda") == 1
    assert resolve_alignment(8, dtype=torch.float32, device_type="cpu") == 8
