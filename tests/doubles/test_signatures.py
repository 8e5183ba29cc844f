"""The double of NCCL EP has names, defaults and signatures of the wheel, where that imports (no GPU needed)."""

import inspect

import pytest

from tests.doubles import nccl_ep, nccl_ep_types

CALLS = [("Group", name) for name in ("create", "create_handle", "destroy")]
CALLS += [("Handle", name) for name in ("update", "dispatch", "combine", "complete", "destroy")]


@pytest.fixture
def wheel():
    return pytest.importorskip("nccl.ep", reason="needs nccl-extensions", exc_type=ImportError)


def parameters(callable_):
    """Name, kind and default; the wheel's enums are compared as numbers."""
    listed = inspect.signature(callable_).parameters.values()
    return [(p.name, p.kind, str(p.default)) for p in listed if p.name != "cls"]


@pytest.mark.parametrize("name", nccl_ep.PUBLIC)
def test_types(wheel, name):
    theirs, ours = getattr(wheel, name), getattr(nccl_ep_types, name)
    if name == "Tensor":
        assert parameters(theirs.__init__) == parameters(ours.__init__)
    elif hasattr(ours, "__members__"):
        assert {m.name: int(m) for m in theirs} == {m.name: int(m) for m in ours}
    else:
        assert parameters(theirs) == parameters(ours)


@pytest.mark.parametrize(("owner", "name"), CALLS)
def test_calls(wheel, owner, name):
    theirs, ours = getattr(getattr(wheel, owner), name), getattr(getattr(nccl_ep, owner), name)
    assert parameters(theirs) == parameters(ours)
