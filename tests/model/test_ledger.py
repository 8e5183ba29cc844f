"""What layers report in a rehearsal is forgotten, and padding takes no place in a deal."""

import torch

from sidestream.model.ledger import Ledger


def test_a_rehearsal_leaves_nothing():
    ledger = Ledger(torch.zeros(2, 4, dtype=torch.int64))
    ledger.make_room_to_observe()
    ledger.begin_attempt(first=5)
    with ledger.rehearsal():
        for total in (*ledger.totals().values(), ledger.dealt):
            total += 1
    assert all(not total.any() for total in ledger.totals().values())
    assert ledger.dealt.tolist() == [5, 5]


def test_a_deal_goes_on_behind_the_valid_tokens():
    ledger = Ledger(torch.zeros(2, 4, dtype=torch.int64))
    ledger.begin_attempt(first=10)
    assert ledger.deal(1, num_tokens=3, valid=torch.tensor([True, False, True])).item() == 10
    assert ledger.deal(1, num_tokens=3, valid=None).item() == 12
    assert ledger.deal(1, num_tokens=1, valid=None).item() == 15
    assert ledger.deal(0, num_tokens=1, valid=None).item() == 10  # every layer for itself
