"""Which rounds count, and what is told of them."""

import torch

from sidestream.profiling.rounds import median, time_rounds


def test_a_median_of_two_middle_rounds_is_their_mean():
    assert median(torch.tensor([[4.0, 1.0], [1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])).tolist() == [2.5, 1.0]


def test_every_arm_warms_up_and_its_warm_up_is_not_counted():
    calls = []

    def measure(arm, index):
        calls.append((arm, index))
        return (10.0 * arm + index,)

    seconds = time_rounds(2, measure, parts=1, rounds=3, warmup=2, seed=0)
    assert sorted(calls) == [(arm, index) for arm in range(2) for index in range(5)]
    assert seconds[:, :, 0].tolist() == [[2.0, 12.0], [3.0, 13.0], [4.0, 14.0]]
