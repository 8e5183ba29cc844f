"""Which ranks a token's rows go to, by hand: 3 ranks of 2 experts."""

import torch

from sidestream.dispatch.base import DispatchSpec, receive_budget
from sidestream.dispatch.packing import PerRank, PerRoute, ToAll

IDS = torch.tensor([[0, 1], [5, 2], [-1, 3], [-1, -1]])


def test_a_row_per_route_goes_where_its_expert_is_and_none_without_a_route():
    assert PerRoute().destinations(IDS, 2, 3).tolist() == [[0, 0], [2, 1], [-1, 1], [-1, -1]]


def test_a_row_per_rank_goes_once_to_each_rank_with_an_expert_of_the_token():
    found = PerRank().destinations(IDS, 2, 3).tolist()
    assert found == [[0, -1, -1], [-1, 1, 2], [-1, 1, -1], [-1, -1, -1]]


def test_all_rows_go_everywhere():
    assert ToAll().destinations(IDS, 2, 3).tolist() == [[0, 1, 2]] * 4


def test_no_rank_has_more_rows_for_another_than_announced():
    # A token chooses no expert twice, so at most as many routes as a rank has experts.
    assert [packing.rows_per_pair(5, 4, 2) for packing in (PerRoute(), PerRank(), ToAll())] == [10, 5, 5]
    assert PerRoute().rows_per_pair(5, 2, 8) == 10


def test_a_budget_is_the_factor_times_the_mean_load_rounded_up():
    def rows(factor, *, tokens, top_k, alignment=1):
        spec = DispatchSpec(num_experts=8, hidden_size=4, max_tokens=tokens, top_k=top_k)
        return receive_budget(factor, spec, alignment=alignment)

    assert rows(1.0, tokens=10, top_k=3) == 64 and rows(1.0, tokens=13, top_k=5) == 128
    assert rows(1.1, tokens=640, top_k=1) == 704  # exactly: 1.1 is no number of fp64
    assert rows(1.0, tokens=100, top_k=2, alignment=48) == 384  # whole units of 48 and of 64
