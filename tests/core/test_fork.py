"""`fork`: gradients of several branches are summed in the order of the views."""

import pytest
import torch

from sidestream.overlap.fork import fork

# In this order the fp32 sum is 0, in the reverse order 1.
SCALES = [1.0, 1e8, -1e8]


def gradient(order, *, forked):
    """Gradient of a shared input whose branches are built in `order`."""
    x = torch.ones(1, requires_grad=True)
    views = fork(x, 3) if forked else (x, x, x)
    branches = [None] * 3
    for index in order:
        branches[index] = views[index] * SCALES[index]
    torch.stack(branches).sum().backward()
    return x.grad.item()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_sum_does_not_depend_on_the_order_of_the_branches(order):
    assert gradient(order, forked=True) == 0.0


def test_without_a_fork_it_does():
    assert len({gradient(order, forked=False) for order in [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)]}) > 1


def test_views_share_memory_and_an_unused_one_adds_nothing():
    x = torch.ones(3, requires_grad=True)
    first, second = fork(x, 2)
    assert first.data_ptr() == second.data_ptr() == x.data_ptr()
    (2 * second).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
