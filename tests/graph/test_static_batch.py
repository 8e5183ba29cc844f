"""A recording reads batches in one place, which is its own."""

import pytest
import torch

from sidestream.data.batch import Batch
from sidestream.graph.static import StaticBatch


def test_every_batch_is_copied_to_the_same_place():
    first, second = (Batch.of(torch.arange(10).view(2, 5) + start) for start in (0, 100))
    static = StaticBatch()
    bound = static.bind(first)
    place = bound.inputs.data_ptr()
    assert torch.equal(bound.inputs, first.inputs) and place != first.inputs.data_ptr()
    assert static.bind(second) is bound and bound.inputs.data_ptr() == place
    assert torch.equal(bound.inputs, second.inputs) and torch.equal(bound.targets, second.targets)


def test_another_shape_is_refused():
    static = StaticBatch()
    static.bind(Batch.of(torch.zeros(2, 5, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"inputs of this batch is \[1, 4\].*set graph=none"):
        static.bind(Batch.of(torch.zeros(1, 5, dtype=torch.int64)))
