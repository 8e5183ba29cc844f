import numpy as np
import pytest

from sidestream.tracking import names
from sidestream.tracking.load import load_metrics


def test_load_of_experts_and_of_ranks():
    metrics = load_metrics(np.array([[6, 0, 2, 0]]), num_ranks=2)
    assert metrics[names.LOAD] == 3.0
    assert metrics[names.RANK_LOAD] == 1.5  # 6 and 2
    assert metrics[names.DEAD_EXPERTS] == 2
    assert metrics[names.LOAD_CV] == pytest.approx(np.std([6, 0, 2, 0]) / 2)


def test_layers_are_listed_and_the_worst_one_counts():
    metrics = load_metrics(np.array([[2, 2, 2, 2], [0, 0, 4, 4], [1, 3, 2, 2]]), num_ranks=2)
    assert metrics[names.LAYER_LOAD] == [1.0, 2.0, 1.5]
    assert metrics[names.LAYER_RANK_LOAD] == [1.0, 2.0, 1.0]
    assert metrics[names.LAYER_DEAD_EXPERTS] == [0, 2, 0]
    assert (metrics[names.LOAD], metrics[names.RANK_LOAD], metrics[names.DEAD_EXPERTS]) == (2.0, 2.0, 2)
    assert metrics[names.LOAD_CV] == 1.0


def test_the_names_do_not_depend_on_the_model():
    dense = load_metrics(np.zeros((0, 8), dtype=np.int64), num_ranks=1)
    assert dense.keys() == load_metrics(np.ones((2, 8), dtype=np.int64), num_ranks=4).keys()
    assert [dense[name] for name in names.PER_LAYER] == [[]] * 4
    assert dense[names.LOAD] is None


def test_a_layer_without_routes_is_no_division_by_zero():
    assert load_metrics(np.zeros((1, 4), dtype=np.int64), num_ranks=2)[names.LAYER_LOAD] == [0.0]
