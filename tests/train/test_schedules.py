"""Learning rates by hand: the first step trains, the warm-up ends where it says, the last step is the lowest."""

import pytest

from sidestream.lightning.schedules import WSD, Constant, Cosine


def test_a_warm_up_begins_above_zero_and_reaches_the_rate():
    constant = Constant(max_steps=10, warmup_steps=4)
    assert [constant(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert Constant(max_steps=10, warmup_steps=0)(0) == 1.0
    assert Constant(max_steps=30, warmup_steps="auto")(1) == pytest.approx(2 / 3)  # a tenth of the run


def test_a_cosine_is_half_way_down_in_the_middle_and_ends_at_its_ratio():
    cosine = Cosine(max_steps=12, warmup_steps=2, min_ratio=0.1)
    assert cosine(1) == 1.0 and 0.97 < cosine(2) < 1.0
    assert cosine(6) == pytest.approx(0.55) and cosine(11) == pytest.approx(0.1)
    assert cosine(20) == pytest.approx(0.1)  # a run that went on


def test_wsd_is_stable_until_its_decay():
    wsd = WSD(max_steps=20, warmup_steps=2, min_ratio=0.0, decay_fraction=0.25)
    assert [wsd(step) for step in range(2, 15)] == [1.0] * 13
    assert [wsd(step) for step in range(15, 20)] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])
