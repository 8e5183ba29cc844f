"""Process groups and the experts' identity."""

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sidestream.dispatch.local import LocalDispatcher
from sidestream.model.moe import local
from sidestream.parallel.mesh import build_parallel
from sidestream.parallel.reduction import is_expert
from tests.core.build_tiny import DISPATCHERS, Setup, full, make_model, parallel_for, run_steps
from tests.core.scale_experts import wire
from tests.rank_pool import ranks

# All ranks create the same groups at the same call.


def groups_of(rank, world, ep):
    parallel_for(ep)  # the groups that tests share
    calls, original = [], dist.new_group

    def record(members, **kwargs):
        calls.append((list(members), kwargs["timeout"]))
        return original(members, **kwargs)

    with mock.patch.object(dist, "new_group", record):
        parallel = build_parallel(expert_parallel_size=ep, device_type="cpu", timeout=timedelta(seconds=45))
        in_build = len(calls)
        make_model(Setup(ep=ep))  # two MoE layers and a dispatcher: no group of their own
    groups = {
        "ep": parallel.ep_group,
        "edp": parallel.edp_group,
        "dp": parallel.dp_group,
        "control": parallel.control,
    }
    members, sums = {}, {}
    for name, group in groups.items():
        members[name] = dist.get_process_group_ranks(group)
        value = torch.tensor(rank + 1)
        dist.all_reduce(value, group=group)
        sums[name] = value.item()
    return calls[:in_build], len(calls) - in_build, members, sums


def test_same_groups_in_the_same_order_on_every_rank():
    results = ranks(4).run(groups_of, ep=2)
    calls = results[0][0]
    assert all(result[0] == calls for result in results)
    everyone = [0, 1, 2, 3]
    assert [members for members, _ in calls] == [everyone, everyone, [0, 2], [1, 3], [0, 1], [2, 3]]
    assert all(timeout == timedelta(seconds=45) for _, timeout in calls)
    assert all(later == 0 for _, later, _, _ in results), "groups are created once, not per layer"
    members, sums = [result[2] for result in results], [result[3] for result in results]
    assert [m["ep"] for m in members] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [m["edp"] for m in members] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [s["ep"] for s in sums] == [3, 3, 7, 7]
    assert [s["edp"] for s in sums] == [4, 6, 4, 6]
    assert all(s["dp"] == s["control"] == 10 for s in sums)


# Impossible layouts.


def layout_of(rank, world, ep):
    with mock.patch.object(dist, "new_group") as new_group:
        try:
            build_parallel(expert_parallel_size=ep, device_type="cpu", timeout=timedelta(seconds=60))
        except ValueError as error:
            return str(error), new_group.call_count
    return "", -1


@pytest.mark.parametrize(("world", "ep"), [(2, 4), (2, 0), (2, -1), (4, 3)])
def test_impossible_expert_parallel_size(world, ep):
    for message, groups_made in ranks(world).run(layout_of, ep=ep):
        expected = f"strategy.expert_parallel_size={ep}: expected a divisor of the world size {world}"
        assert message == expected and groups_made == 0


def layout_of_experts(rank, world, num_experts):
    parallel = parallel_for(4)
    with pytest.raises(ValueError, match=rf"model.num_experts={num_experts}: .* expert-parallel size 4"):
        wire("alltoall", num_experts=num_experts, group=parallel.ep_group)
    with pytest.raises(ValueError, match=rf"model.num_experts={num_experts}: .* expert-parallel size 4"):
        parallel.expert_range(num_experts)
    assert parallel.expert_range(8) == (2 * rank, 2 * rank + 2)


def test_experts_that_do_not_divide():
    ranks(4).run(layout_of_experts, num_experts=6)


def layout_of_local(rank, world):
    with pytest.raises(
        ValueError, match=r"dispatcher=local: .* 2 ranks; set strategy.expert_parallel_size=1"
    ):
        wire("local", num_experts=8, group=parallel_for(2).ep_group)


def test_local_dispatcher_needs_all_experts():
    ranks(2).run(layout_of_local)


@pytest.mark.parametrize("name", DISPATCHERS)
def test_exact_sizes_have_no_budget(name):
    with pytest.raises(ValueError, match=rf"dispatcher={name}: budget 64"):
        wire(name, num_experts=2).resize(64)


def test_wire_comes_first():
    with pytest.raises(AssertionError, match="wire"):
        LocalDispatcher().plan(None)


# Experts differ from each other.


def experts_on_ranks(rank, world, ep, steps):
    if steps:
        setup = Setup(ep=ep, steps=steps, optimizer="sgd")
        out = run_steps(rank, world, setup)
        return {name: value for name, value in out["params"].items() if ".experts." in name}
    model = make_model(Setup(ep=ep))
    return {name: full(p) for name, p in model.named_parameters() if is_expert(p)}


@pytest.mark.parametrize("steps", [0, 3])
def test_experts_differ_and_do_not_depend_on_ep(steps):
    reference = ranks(1).run(experts_on_ranks, ep=1, steps=steps)[0]
    assert len(reference) == 4
    for world, ep in [(2, 1), (2, 2), (4, 4), (4, 2)]:
        results = ranks(world).run(experts_on_ranks, ep=ep, steps=steps)
        for name, weights in results[0].items():
            # Every rank gathered from its own ep group: equal results are equal replicas.
            assert all(torch.equal(weights, other[name]) for other in results), f"{name}: replicas differ"
            pairs = [(weights[i], weights[j]) for i in range(8) for j in range(i)]
            assert not any(torch.equal(a, b) for a, b in pairs), f"{name}: two experts are the same"
            # The same numbers at the start; after three steps, up to the order of sums (3e-8 seen).
            assert (weights - reference[name]).abs().max() <= (5e-7 if steps else 0.0), name


def shards(rank, world, steps):
    model = make_model(Setup(ep=2))
    return [local(p).shape[0] for p in model.parameters() if is_expert(p)], model.parts.expert_range


def test_a_rank_holds_only_its_share():
    for rank, (sizes, expert_range) in enumerate(ranks(2).run(shards, steps=0)):
        assert sizes == [4] * 4 and expert_range == (4 * rank, 4 * rank + 4)
