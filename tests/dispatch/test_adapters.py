"""Adapters of NCCL EP, DeepEP and HybridEP against their doubles: numbers, overflow, plans in flight, order, limits."""

import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from sidestream.dispatch import library as shared
from sidestream.dispatch import switch
from sidestream.dispatch.base import Routing
from sidestream.dispatch.cap import cap_routing, needed_rows
from sidestream.dispatch.deep_ep import DeepEPDispatcher
from sidestream.dispatch.hybrid_ep import HybridEPDispatcher
from sidestream.dispatch.nccl_ep import NcclEPDispatcher
from sidestream.dispatch.packed import route_counts
from sidestream.exchange.link import NativeLink, ThrottledLink
from tests.dispatch.adapters import (
    ADAPTERS,
    MAX_TOKENS,
    E,
    Experts,
    K,
    Setup,
    close,
    compare,
    dense,
    draw,
    forward,
    kept,
    local_scale,
    make,
    run,
    spec_of,
    step,
)
from tests.doubles.hybrid_ep import HybridEP
from tests.doubles.nccl_ep import NcclEP
from tests.rank_pool import ranks

CASES = {
    "nccl_ep eager": Setup("nccl_ep"),
    "nccl_ep static": Setup("nccl_ep", 2.0),
    "nccl_ep bf16": Setup("nccl_ep", 2.0, dtype=torch.bfloat16),
    "nccl_ep unpadded": Setup("nccl_ep", alignment=1),
    "deep_ep eager": Setup("deep_ep"),
    "deep_ep static": Setup("deep_ep", 2.0),
    "deep_ep unpadded": Setup("deep_ep", 2.0, alignment=1),
    "hybrid_ep eager": Setup("hybrid_ep"),
    "hybrid_ep static": Setup("hybrid_ep", 2.0),
    "hybrid_ep unpadded": Setup("hybrid_ep", alignment=1),
}
MODES = {
    f"{name} {mode}": Setup(name, f) for name in ADAPTERS for mode, f in (("eager", None), ("static", 2.0))
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(3)
def test_output_and_gradients_equal_a_dense_computation(case):
    # Unequal tokens, routes of -1 with NaN weights, NaN in every tail.
    ranks(2).run(run, setup=CASES[case])


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_four_ranks_one_without_tokens(case):
    ranks(4).run(run, setup=CASES[case])


@pytest.mark.parametrize("case", [case for case in MODES if "hybrid" not in case])
def test_one_rank(case):
    ranks(1).run(run, setup=MODES[case])


@pytest.mark.parametrize("case", MODES)
@pytest.mark.sample(2)
def test_starved_rank(case):
    # Rank 1 has no tokens, and nobody's tokens go to its experts.
    ids = [torch.tensor([[t % 4, -1] for t in range(12)]), torch.zeros(0, K, dtype=torch.int64)]
    ranks(2).run(run, setup=MODES[case].with_(tokens=(12, 0), ids=ids))


# Overflow.


def crowd(tokens: int) -> list[torch.Tensor]:
    """All routes of both ranks go to the experts of rank 0."""
    return [torch.tensor([[t % 2, 2 + t % 2] for t in range(tokens)]) for _ in range(2)]


def overflow(rank, world, name):
    # 32 tokens with two routes each from both ranks: 128 rows, where there is room for 64.
    setup = Setup(name, 0.5, tokens=(32, 32), ids=crowd(32), layers=2)
    adapter = make(setup)
    assert adapter.budget == 64
    p = draw(setup, world)
    keep, needed = kept(p, budget=64, alignment=8)
    compare(step(adapter, p, rank, layer=1), dense(p, rank, keep), setup)
    assert adapter.needed().tolist() == [0, needed[rank]] and needed == [128, 0]
    lost = (p.ids[rank] >= 0).sum() - keep[rank].sum() if name == "deep_ep" else max(0, needed[rank] - 64)
    assert adapter.dropped().tolist() == [0, int(lost)]
    # Again with room for all: nothing of the first attempt is left.
    adapter.resize(100)
    assert adapter.budget == 128
    adapter.resize(64)  # never shrinks
    assert adapter.budget == 128
    adapter.reset_needed()
    compare(step(adapter, p, rank), dense(p, rank), setup)
    assert adapter.needed().tolist() == [needed[rank], 0] and adapter.dropped().tolist() == [0, 0]
    close(adapter)
    return (~keep[0]).nonzero().tolist(), (~keep[1]).nonzero().tolist()


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.sample(1)
def test_overflow_drops_the_last_experts_and_says_what_was_needed(name):
    lost = ranks(2).run(overflow, name=name)
    # Experts 0 and 1 fill the buffer; 2 and 3 lose all routes.
    assert lost[0] == lost[1] == ([[t, 1] for t in range(32)],) * 2


def test_cap_routing_equals_a_walk_over_the_rows():
    generator = torch.Generator().manual_seed(3)
    for world, budget, alignment in ((1, 24, 8), (2, 16, 4), (2, 0, 1), (4, 12, 1), (4, 64, 8)):
        tokens = torch.randint(
            8, 20, (world,), generator=generator
        ).tolist()  # fills budgets before the last rank
        p = draw(Setup("nccl_ep", tokens=tuple(tokens)), world, seed=world + budget)
        histogram = torch.stack([route_counts(ids, E) for ids in p.ids])
        keep, needed = kept(p, budget=budget, alignment=alignment)
        sizes = {"num_local": E // world, "alignment": alignment}
        for rank in range(world):
            found = cap_routing(p.ids[rank], histogram, rank=rank, budget=budget, **sizes)
            assert torch.equal(found, torch.where(keep[rank], p.ids[rank], -1))
            assert int(needed_rows(histogram, rank=rank, **sizes)) == needed[rank]


def eager(rank, world, name):
    adapter = make(Setup(name))
    assert adapter.needed() is adapter.dropped() is adapter.budget is None
    with pytest.raises(ValueError, match=f"dispatcher={name}: budget 64 asked for"):
        adapter.resize(64)
    assert adapter.bytes_sent() == adapter.metadata_bytes_sent() == 0
    p = draw(Setup(name), world)
    plan = adapter.plan(Routing(p.ids[rank], p.w[rank]))
    before = plan.rows()  # asked for before anything is dispatched
    received = adapter.dispatch(p.x[rank], plan).wait()
    assert received.rows.shape[0] == plan.rows() == before
    with pytest.raises(ValueError, match=f"dispatcher={name}: 65 tokens, but buffers are sized for 64"):
        adapter.plan(Routing(torch.zeros(65, K, dtype=torch.int64), torch.ones(65, K)))
    close(adapter)


@pytest.mark.parametrize("name", ADAPTERS)
def test_eager_knows_its_rows_and_has_no_budget(name):
    ranks(2).run(eager, name=name)


# Several plans, steps and layers.


def in_flight(rank, world, setup):
    """Two routings interleaved, then three layers one after another, in every step."""
    adapter = make(setup)
    for seed in range(3):
        problems = [draw(setup, world, seed=seed), draw(setup, world, seed=10 + seed)]
        leaves, pending = [], []
        for p in problems:
            x, w = p.x[rank].clone().requires_grad_(), p.w[rank].clone().requires_grad_()
            plan = adapter.plan(Routing(p.ids[rank], w))
            pending.append((plan, adapter.dispatch(x, plan)))
            leaves.append((x, w, local_scale(p, rank).requires_grad_()))
        outs = [None, None]
        for index in (1, 0):
            plan, dispatched = pending[index]
            outs[index] = forward_rest(adapter, plan, dispatched.wait(), leaves[index][2])
        torch.autograd.backward(outs, [p.grad[rank] for p in problems])
        for p, y, leaf in zip(problems, outs, leaves):
            compare([y.detach(), *(t.grad for t in leaf)], dense(p, rank), setup)
        with torch.no_grad():  # no backward ends these plans
            p = problems[0]
            for layer in range(3):
                y = forward(adapter, p, rank, local_scale(p, rank), p.x[rank], p.w[rank], layer)
            compare([y], dense(p, rank)[:1], setup)
        del pending, outs, plan, dispatched, y
    return close(adapter)


def forward_rest(adapter, plan, received, scale_LH):
    rows = Experts.apply(received.rows, received.row_weights, scale_LH, received.offsets)
    return adapter.combine(rows, plan).wait()


@pytest.mark.parametrize("case", MODES)
@pytest.mark.sample(2)
def test_plans_in_flight_and_handles_used_again(case):
    for log in ranks(2).run(in_flight, setup=MODES[case].with_(layers=3)):
        if case.startswith("nccl_ep"):
            # Two plans at a time need two handles, over all steps; then the order of the end.
            assert log == ["+comm", "+group", "+handle", "+handle", "-handle", "-handle", "-group", "-comm"]
        else:
            assert log == ["+buffer", "-buffer"]


def order(rank, world, setup):
    adapter = make(setup)
    p, tags, waits = draw(setup, world), [], []
    channel = adapter.channel
    channel.on_start, channel.on_wait, channel.spans = tags.append, waits.append, []
    step(adapter, p, rank)
    assert channel.pending == 0 and [span.tag for span in channel.spans] == waits
    assert all(span.issued <= span.wait_began <= span.completed for span in channel.spans)
    assert all(span.sent_bytes == 0 for span in channel.spans if "histogram" not in span.tag)
    close(adapter)
    return tags, waits


@pytest.mark.parametrize("case", MODES)
@pytest.mark.sample(2)
def test_calls_pass_the_hooks_of_the_channel_in_one_order(case):
    found = ranks(2).run(order, setup=MODES[case])
    tags, waits = found[0]
    metadata = {"nccl_ep": ["dispatch.counts"], "deep_ep eager": [], "hybrid_ep eager": []}
    first = metadata.get(case, metadata.get(case.split()[0], ["dispatch.histogram"]))
    assert tags == [*first, "dispatch", "combine", "combine.backward", "dispatch.backward"]
    assert sorted(tags) == sorted(waits) and found[0] == found[1]


def second_backward(rank, world):
    setup = Setup("nccl_ep", 2.0)
    adapter = make(setup)
    p = draw(setup, world)
    x, scale = p.x[rank].clone().requires_grad_(), local_scale(p, rank)
    y = forward(adapter, p, rank, scale, x, p.w[rank])
    y.backward(p.grad[rank], retain_graph=True)
    with pytest.raises(AssertionError, match="the backward of this plan is done"):
        y.backward(p.grad[rank])


def test_a_handle_that_went_back_to_the_pool_is_not_used():
    ranks(2).run(second_backward)


# Which transport, and what it refuses.


def refused(rank, world, name, change, message):
    with pytest.raises(ValueError, match=message):
        make(Setup(name, spec=change))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("nccl_ep", {"num_experts": 9}, "dispatcher=nccl_ep: 9 experts on 2 ranks; set model.num_experts"),
        ("nccl_ep", {"num_experts": 2}, "2 experts in an NVLink domain.* 4; set dispatcher.transport=torch"),
        ("nccl_ep", {"max_tokens": 8193}, "8193 tokens per rank, and at most 8192"),
        ("nccl_ep", {"max_tokens": 0}, "max_tokens=0"),
        ("nccl_ep", {"hidden_size": 6}, "rows of 24 bytes, which must be a multiple of 16"),
        ("nccl_ep", {"hidden_size": 16388}, "16388 values in a row, and at most 16384"),
        ("nccl_ep", {"num_experts": 514}, "257 experts per rank|514 experts in an NVLink domain"),
        ("nccl_ep", {"num_experts": 516}, "258 experts per rank, and at most 256"),
        ("nccl_ep", {"dtype": torch.float64}, "rows of torch.float64"),
        ("nccl_ep", {"alignment": 24}, "alignment 24 is no power of two"),
        ("deep_ep", {"hidden_size": 128}, "rows of 256 bytes, which must be a multiple of 512"),
        ("deep_ep", {"top_k": 33}, "33 experts per token, and at most 32"),
        ("deep_ep", {"num_experts": 4096}, "4096 experts, and at most 2048"),
        ("deep_ep", {"dtype": torch.float32}, "rows of torch.float32; set trainer.precision=bf16-mixed"),
        ("deep_ep", {"dtype": torch.float16}, "the library sums bf16"),
        ("hybrid_ep", {"hidden_size": 24}, "rows of 48 bytes, which must be a multiple of 32"),
        ("hybrid_ep", {"num_experts": 6}, "6 experts in an NVLink domain"),
        ("hybrid_ep", {"dtype": torch.float16}, "the library sums bf16"),
    ],
)
def test_limits_are_checked_when_wired(name, change, message):
    ranks(2).run(refused, name=name, change=change, message=message)


def other_refusals(rank, world):
    with pytest.raises(ValueError, match="dispatcher=hybrid_ep: 1 rank, and it needs two"):
        make(Setup("hybrid_ep"))
    with pytest.raises(
        ValueError, match=r"a buffer of 128 rows.* 192 tokens.*; set dispatcher.capacity_factor=0\.506"
    ):
        make(Setup("nccl_ep", 0.25, spec={"max_tokens": 190}))
    adapter, slow = ADAPTERS["nccl_ep"][0](library=NcclEP()), ThrottledLink(gbps=1.0)
    with pytest.raises(ValueError, match="link=throttled: dispatcher=nccl_ep with transport=library"):
        adapter.wire(group=dist.group.WORLD, spec=spec_of(Setup("nccl_ep")), link=slow)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="fill_uninitialized_memory=False"):
            make(Setup("deep_ep"))
    finally:
        torch.use_deterministic_algorithms(False)


def test_other_refusals():
    ranks(1).run(other_refusals)


@pytest.mark.parametrize("name", ADAPTERS)
def test_mxfp8_is_refused(name):
    with pytest.raises(
        ValueError, match=r"dispatcher.wire_dtype=mxfp8: .* differ from this one and from each other"
    ):
        ADAPTERS[name][0](wire_dtype="mxfp8")


def test_the_wrong_deep_ep_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "deep_ep", HybridEP())
    library, problem = shared.load("deep_ep")
    assert library is None
    assert "the installed deep_ep is that of HybridEP, it has no ElasticBuffer" in problem
    assert shared.load("hybrid_ep")[1] is None
    monkeypatch.setitem(sys.modules, "deep_ep", ModuleType("deep_ep"))
    assert "the installed deep_ep is another package, it has no HybridEPBuffer" in shared.load("hybrid_ep")[1]
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    assert "deep_ep does not import" in shared.load("deep_ep")[1]


def through_the_switch(rank, world):
    double = NcclEP()
    names = {"nccl": ModuleType("nccl"), "nccl.ep": double, "nccl.ep.interop.torch": double.interop.torch}
    with pytest.MonkeyPatch.context() as patch:
        for name, module in names.items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(switch, "importable", lambda module: module == "nccl.ep")
        dispatcher = NcclEPDispatcher(transport="library", capacity_factor=2.0, alignment=8)
        setup = Setup("nccl_ep", 2.0)
        patch.setattr("sidestream.dispatch.library.lane_for", lambda device: setup.lane())
        dispatcher.wire(group=dist.group.WORLD, spec=spec_of(setup), link=NativeLink())
        p = draw(setup, world)
        dispatcher.align = dispatcher.chosen.align
        compare(step(dispatcher, p, rank), dense(p, rank), setup)
        assert dispatcher.transport == "nccl_ep" and dispatcher.budget == 2 * MAX_TOKENS * K
        dispatcher.close()
        double.check_closed()
        # One rank without it: all of them say so, and nobody hangs.
        patch.setattr(shared, "load", lambda *names: (None, "it is not here") if rank else (double, None))
        lost = NcclEPDispatcher(transport="library")
        patch.setattr("sidestream.dispatch.nccl_ep.load", shared.load)
        with pytest.raises(RuntimeError, match="rank 1 of the expert-parallel group: it is not here"):
            lost.wire(group=dist.group.WORLD, spec=spec_of(setup), link=NativeLink())


def test_transport_library_takes_the_adapter():
    ranks(2).run(through_the_switch)


@pytest.mark.parametrize("kind", [NcclEPDispatcher, DeepEPDispatcher, HybridEPDispatcher])
def test_each_option_makes_its_adapter(kind):
    made = kind(capacity_factor=1.5, alignment=16).make_library()
    assert made.name == kind.name == kind().make_torch().name
    assert made.capacity_factor == 1.5 and made.own_alignment == 16
    with pytest.raises(ValueError, match="wire_dtype=mxfp8"):
        kind(wire_dtype="mxfp8").make_library()
