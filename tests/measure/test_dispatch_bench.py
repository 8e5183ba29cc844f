"""The dispatch benchmark: its definitions by hand, a small measurement in the rank pool, and what it refuses."""

import copy
import io
import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from sidestream.dispatch import deep_ep, nccl_ep, packed, switch
from sidestream.dispatch.base import Received
from sidestream.fusion.grouped import GroupedExperts
from sidestream.measure import dispatch, dispatch_report
from sidestream.measure.dispatch import Job, make_rows, run_job
from sidestream.measure.dispatch_arms import BareFloor, DispatcherArm, ExchangeFloor, Given, compose_dispatch
from sidestream.measure.dispatch_merge import decide, in_words, merge
from sidestream.measure.dispatch_report import add_statistics, markdown, print_tables
from sidestream.measure.dispatch_routing import (
    Draw,
    Necessary,
    RoutingHash,
    activation_bytes,
    draw_routing,
    necessary,
    pairs,
)
from sidestream.measure.shapes import LayerShape
from tests.docs.pages import REPOSITORY, script
from tests.rank_pool import ranks

CONF = REPOSITORY / "conf"
CPU = torch.device("cpu")
TINY = LayerShape("tiny", 32, 32, 32, 8, 2)
HAND = LayerShape("hand", 3, 32, 16, 4, 2)
# Experts 0 and 1 are on rank 0, 2 and 3 on rank 1. Of rank 0 two tokens need rank 1, of rank 1 one token needs rank 0.
IDS = [[[0, 1], [1, 2], [2, 3]], [[3, 2], [2, 3], [0, 3]]]
MATRIX = [[2, 2], [1, 3]]
ROW = 32 * 2
bench_dispatch = script("scripts/bench_dispatch.py")
render_readme = script("tools/render_readme.py")


def tiny_job(**changes) -> Job:
    options = {
        "shapes": [TINY],
        "routings": ["uniform", "one_rank"],
        "arms": ["nccl_ep", "alltoall", "nccl_ep,dispatcher.capacity_factor=1.5"],
        "floors": ["nccl_ep"],
        "dtype": "bf16",
        "rounds": 2,
        "warmup": 0,
        "seed": 1,
        "order_seed": 1,
        "conf": str(CONF),
    }
    return Job(**{**options, **changes})


# Definitions


def test_necessary_bytes_of_a_routing_computed_by_hand():
    found = [pairs(torch.tensor(ids), num_local=2, world_size=2).tolist() for ids in IDS]
    assert found == MATRIX
    need = Necessary(MATRIX, ROW)
    assert need.dispatched == [2 * ROW, 1 * ROW]
    assert need.combined == [1 * ROW, 2 * ROW]  # the same rows, the other way
    assert need.of_cycle == 4 * 3 * ROW
    assert need.logical == 5 * ROW  # rank 1 receives 2 + 3; rank 0 sends 4


def hand_given(rank: int) -> Given:
    x, gradient = make_rows(HAND, dtype=torch.bfloat16, device=CPU, seed=0)
    return Given.of(Draw(torch.tensor(IDS[rank]), torch.full((3, 2), 0.5)), x, gradient)


def bytes_by_hand(rank: int, world: int) -> dict:
    given, found = hand_given(rank), {}
    found["necessary"] = necessary(given.routing.expert_ids, HAND, world_size=world, value_bytes=2)
    for name in ("nccl_ep", "alltoall", "allgather", "nccl_ep,dispatcher.wire_dtype=mxfp8"):
        arm = DispatcherArm(name, HAND, conf=CONF, dtype=torch.bfloat16, device=CPU)
        found[name] = dispatch._bytes(arm, given)
        if name == "alltoall":
            floors = [kind(arm, conf=CONF, dtype=torch.bfloat16) for kind in (ExchangeFloor, BareFloor)]
            for floor in floors:
                floor.prepare(given)
                before = floor.channel.bytes_sent
                floor.cycle()
                found[floor.kind] = floor.sizes.send.tolist(), floor.channel.bytes_sent - before
                floor.close()
        arm.close()
    return found


@pytest.mark.full
def test_measured_bytes_are_those_of_the_routing():
    for rank, found in enumerate(ranks(2).run(bytes_by_hand)):
        assert found["necessary"] == Necessary(MATRIX, ROW)
        rows = {
            name: found[name]["bytes"]["dispatch"]["rows"]
            for name in found
            if name.startswith(("nccl", "all"))
        }
        assert rows["nccl_ep"] == [2 * ROW, 1 * ROW]
        assert rows["alltoall"] == [3 * ROW, 1 * ROW]  # a row per route to the other rank
        assert rows["allgather"] == [3 * ROW, 3 * ROW]
        assert rows["nccl_ep,dispatcher.wire_dtype=mxfp8"] == [2 * 33, 1 * 33]
        parts = found["nccl_ep"]["bytes"]
        assert parts["combine"]["rows"] == parts["dispatch_backward"]["rows"] == [1 * ROW, 2 * ROW]
        assert parts["combine_backward"]["rows"] == [2 * ROW, 1 * ROW]
        assert parts["combine"]["metadata"] == [0, 0] and min(parts["dispatch"]["metadata"]) > 0
        # Received: the other rank's row and its ids and weights, 6 bytes for each of 2 routes, and counts.
        assert parts["dispatch"]["received"][0] >= ROW + 12
        send, sent_by_exchange = found["exchange"]
        assert send == [[3, 3], [1, 5]][rank] and sent_by_exchange == 2 * ROW * (3 + 1)


def test_what_the_experts_keep():
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    shape, slots, dtype = LayerShape("x", 0, 32, 64, 2, 1), 96, torch.bfloat16
    rows = torch.randn(slots, 32).to(dtype).requires_grad_()
    weights = torch.rand(slots).requires_grad_()
    offsets = torch.tensor([48, 96], dtype=torch.int32)
    w_gate_up, w_down = torch.randn(2, 32, 128).to(dtype), torch.randn(2, 64, 32).to(dtype)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        GroupedExperts()(Received(rows, weights, offsets), w_gate_up, w_down)
    for other in (offsets, w_gate_up, w_down):
        kept.pop(other.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) == activation_bytes(slots, shape, value_bytes=2)


def test_routings():
    draws = {
        kind: draw_routing(kind, TINY, seed=1, draw=0, rank=0, world_size=2, tokens=4000)
        for kind in ("uniform", "zipf", "one_rank")
    }
    load = {kind: torch.bincount(draw.ids.flatten(), minlength=8) / 8000 for kind, draw in draws.items()}
    assert load["uniform"].min() > 0.11 and load["uniform"].max() < 0.14
    assert load["zipf"].tolist() == sorted(load["zipf"], reverse=True) and load["zipf"][0] > 0.25
    assert load["one_rank"][:4].min() > 0.2 and load["one_rank"][4:].max() == 0
    for draw in draws.values():
        assert torch.allclose(draw.weights.sum(1), torch.ones(4000))
        assert (draw.ids.sort(dim=1).values.diff(dim=1) > 0).all()  # never an expert twice
    same, other = (
        draw_routing("zipf", TINY, seed=1, draw=number, rank=0, world_size=2, tokens=4000)
        for number in (0, 1)
    )
    assert torch.equal(same.ids, draws["zipf"].ids) and not torch.equal(other.ids, same.ids)
    few = LayerShape("few", 16, 32, 32, 4, 3)  # 2 experts on rank 0, 3 routes
    assert (draw_routing("one_rank", few, seed=1, draw=0, rank=1, world_size=2).ids < 2).sum(1).tolist() == [
        2
    ] * 16
    with pytest.raises(ValueError, match="routing=even: expected one of uniform, zipf, one_rank"):
        draw_routing("even", TINY, seed=1, draw=0, rank=0, world_size=2)


# A measurement


def measure(rank: int, world: int, **changes) -> list[dict]:
    return run_job(tiny_job(**changes), say=lambda _: None)


@pytest.fixture(scope="module")
def records() -> list[dict]:
    return ranks(2).run(measure)[0]


@pytest.fixture
def result(records, monkeypatch) -> dict:
    """What the script makes of the records, before figures are added."""
    group = {"records": copy.deepcopy(records), "pinned": True, "memory_kept": True}
    monkeypatch.setattr(bench_dispatch, "run_ranks", lambda job, **_: copy.deepcopy(group))
    options = bench_dispatch.arguments(["--shapes", "32,32,32,8,2@2"])
    cases = bench_dispatch.parse_shapes(options.shapes)
    return bench_dispatch.measure(
        options, cases, 0, command="python x.py", code={"commit": "1", "dirty": False}
    )


@pytest.mark.full
def test_a_measurement(records):
    uniform, one_rank = records
    assert (uniform["routing"]["kind"], one_rank["routing"]["kind"]) == ("uniform", "one_rank")
    assert (
        uniform["routing"]["hash"] != one_rank["routing"]["hash"]
        and one_rank["routing"]["rank_max_over_mean"] == 2
    )
    assert [(arm["kind"], arm["transport"]) for arm in uniform["arms"].values()] == [
        ("dispatcher", "torch")
    ] * 3 + [
        ("exchange", "torch"),
        ("bare", "torch"),
    ]
    for record in records:
        add_statistics(record)
        arms = record["arms"]
        for arm in arms.values():
            (start,) = arm["starts"]
            assert {len(values) for values in start["rounds_ms"].values()} == {2}
            assert all(value > 0 for values in start["rounds_ms"].values() for value in values)
        assert (
            arms["nccl_ep"]["bytes_over_necessary"]["rows"]
            == 1.0
            < arms["nccl_ep"]["bytes_over_necessary"]["all"]
        )
        assert arms["alltoall"]["bytes_over_necessary"]["rows"] > 1
        assert arms["nccl_ep"]["ratio"] == {"min": 1.0, "median": 1.0}
        assert max(arms["nccl_ep"]["error"].values()) < 1e-2 and arms["nccl_ep"]["static"] is None
        # bytes / (1e6 x ms) is GB/s
        speed, cycle = arms["alltoall"]["gbps"]["cycle"], arms["alltoall"]["ms"]["cycle"]["median"]
        assert speed["logical"] == pytest.approx(
            4 * record["necessary_bytes"]["logical"] / 1e6 / cycle, abs=1e-4
        )
        assert list(record["exchange_over_bare"]) == ["nccl_ep"]
    static, lossy = (record["arms"]["nccl_ep,dispatcher.capacity_factor=1.5"] for record in records)
    assert static["static"]["budget_rows"] == 128 and static["static"]["dropped_share"] == 0
    assert static["pinned_bytes"] == activation_bytes(128, TINY, value_bytes=2)
    # 128 routes of 2 x 32 tokens, and padding to 16 rows for each of 4 experts: they do not fit.
    assert lossy["static"]["needed_rows"] > 128 and 0 < lossy["static"]["dropped_share"] < 0.5
    assert lossy["dropped_in_check"] > 0 and lossy["error_to_first"] is None


def wrong_dispatcher(rank: int, world: int, where: str) -> str:
    right = packed.sum_routes

    def wrong(rows, layout, *, top_k):
        out = right(rows, layout, top_k=top_k)
        return out * 1.1 if where == "output" else 1.1 * out - 0.1 * out.detach()

    packed.sum_routes = wrong
    try:
        measure(rank, world, floors=[])
    except ValueError as error:
        return str(error)
    finally:
        packed.sum_routes = right
    return "accepted"


@pytest.mark.parametrize("where", ["output", "gradient"])
def test_an_arm_that_is_wrong_is_not_timed(where):
    wrong = "output" if where == "output" else "x"
    for message in ranks(2).run(wrong_dispatcher, where=where):
        assert message.startswith(f"nccl_ep: relative error of {wrong} is ")


def on_doubles(rank: int, world: int) -> list[dict]:
    """Libraries that are doubles on gloo, as the adapters' own tests use them."""
    from tests.dispatch.adapters import ADAPTERS, LateLane

    def double_of(name):
        def make(self):
            adapter, double = ADAPTERS[name]
            return adapter(capacity_factor=self.capacity_factor, library=double(), lane=LateLane())

        return make

    kinds = {"nccl_ep": nccl_ep.NcclEPDispatcher, "deep_ep": deep_ep.DeepEPDispatcher}
    kept, importable = {kind: kind.make_library for kind in kinds.values()}, switch.importable
    switch.importable = lambda module: True
    for name, kind in kinds.items():
        kind.make_library = double_of(name)
    shape = LayerShape("wide", 32, 256, 32, 8, 2)
    names = [f"{name},dispatcher.transport=library" for name in kinds]
    arms = [*names, "alltoall", f"{names[0]},dispatcher.capacity_factor=2.0"]
    try:
        return run_job(
            tiny_job(arms=arms, floors=names[:1], shapes=[shape], rounds=1, routings=["uniform"]),
            say=lambda _: None,
        )
    finally:
        switch.importable = importable
        for kind, make in kept.items():
            kind.make_library = make


@pytest.mark.full
def test_libraries_are_measured_over_the_same_boundary():
    (record,) = ranks(2).run(on_doubles)[0]
    add_statistics(record)
    library = record["arms"]["nccl_ep,dispatcher.transport=library"]
    assert library["transport"].startswith("nccl_ep")
    assert library["bytes"] is None and library["gbps"]["cycle"]["wire"] is None
    assert library["gbps"]["cycle"]["logical"] > 0 and library["bytes_over_necessary"] is None
    assert record["arms"]["deep_ep,dispatcher.transport=library"]["transport"].startswith("deep_ep")
    assert "exchange of nccl_ep,dispatcher.transport=library" in record["arms"]
    out = io.StringIO()
    print_tables(
        {"results": [record], "precision": "bf16", "load_average": {"before": [0], "after": [0]}},
        Console(file=out, width=200),
    )
    assert "not said" in out.getvalue() and "Transports differ between arms: deep_ep" in out.getvalue()


# The script, its files and its page


@pytest.mark.full
def test_the_script_writes_figures_picture_and_page(result, tmp_path, monkeypatch, capsys):
    out = tmp_path / "bench_dispatch.json"
    options = bench_dispatch.arguments(["--out", str(out), "--compare", "nccl_ep", "alltoall"])
    assert bench_dispatch.finish(result, options) == 0
    written = json.loads(out.read_text())
    assert {"schema_version", "host", "commit", "device", "transport", "environments"} <= written.keys()
    assert written["transport"] == ["torch"] and written["environments"][0]["versions"]["torch"]
    assert out.with_suffix(".png").stat().st_size > 5000
    printed = capsys.readouterr().out
    assert (
        "exchange / bare of nccl_ep" in printed and "not supported: 1 start(s) of both, expected 3" in printed
    )
    monkeypatch.setattr(render_readme, "DISPATCH_RESULT", out)
    page = render_readme.render_dispatch(render_readme.DISPATCH.read_text())
    assert "| 32,32,32,8,2 |" not in page and "| tiny | 2 | one_rank | `alltoall` | torch |" in page
    assert (
        "(results/bench_dispatch.png)" in page and "nccl_ep by the same contract on torch.distributed" in page
    )
    assert render_readme.render_dispatch(page) == page


def test_the_page_shows_the_committed_measurement():
    page = render_readme.DISPATCH.read_text()
    assert render_readme.render_dispatch(page) == page, "run `make readme`"
    assert render_readme.DISPATCH_BEGIN in page and render_readme.DISPATCH_END in page
    if render_readme.DISPATCH_RESULT.exists():
        result = json.loads(render_readme.DISPATCH_RESULT.read_text())
        assert (result["benchmark"], result["status"]) == ("dispatch", "finished")
        assert render_readme.DISPATCH_RESULT.with_suffix(".png").exists()


def test_names_that_mean_nothing_are_refused(capsys):
    for words, message in (
        (
            ["--arms", "nccl_ep", "--compare", "nccl_ep", "deep_ep"],
            "compare=deep_ep: expected one of nccl_ep",
        ),
        (["--arms", "nccl_ep", "--floors", "alltoall"], "floors=alltoall: expected one of nccl_ep"),
        (["--arms", "nccl_ep", "nccl_ep"], "arms: the same twice"),
        (["--shapes", "C@3"], "shape=C@3: expected a number of ranks"),
    ):
        assert bench_dispatch.main(words) == 1
        assert f"error: {message}" in capsys.readouterr().err
    for override in ("dispatcher.nothing=1", "dispatcher.capacity_factor=many"):
        with pytest.raises(ValueError, match=f"dispatcher=nccl_ep, {override}: "):
            compose_dispatch(CONF, TINY, f"nccl_ep,{override}")
    for name in ("nccl_ep,1.25", "dispatcher=nccl_ep", ""):
        with pytest.raises(ValueError, match=f"arm={name}: expected <dispatcher>"):
            compose_dispatch(CONF, TINY, name)


# Merging and deciding


def another(result: dict, *, arm: str | None = None) -> dict:
    """A later measurement of the same; `arm`: the other name that its first arm has."""
    other = copy.deepcopy(result)
    other["environments"][0]["id"] = "other"
    if arm is not None:
        for record in other["results"]:
            record["arms"] = {
                arm if name == "nccl_ep" else name: kept for name, kept in record["arms"].items()
            }
    return other


@pytest.mark.full
def test_merge_puts_arms_and_starts_together(result):
    merged = merge({"a": result, "b": another(result, arm="deep_ep")})
    arms = merged["results"][0]["arms"]
    assert (
        len(arms["alltoall"]["starts"]) == 2
        and len(arms["nccl_ep"]["starts"]) == len(arms["deep_ep"]["starts"]) == 1
    )
    assert [start["environment"] for start in arms["alltoall"]["starts"]] == [0, 1]
    assert (
        arms["deep_ep"]["starts"][0]["environment"] == 1
        and len(merged["environments"]) == merged["starts"] == 2
    )
    add_statistics(merged["results"][0])
    assert len(arms["alltoall"]["ms"]["cycle"]["start_medians"]) == 2
    assert len(result["results"][0]["arms"]["alltoall"]["starts"]) == 1  # the inputs stay as they are


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(host="elsewhere"), "merge b: host is elsewhere, in a "),
        (lambda r: r.update(commit="0"), "merge b: commit is 0, in a "),
        (
            lambda r: r["results"][1]["routing"].update(hash="0"),
            "merge b: shape tiny, routing one_rank: routing hash 0",
        ),
        (lambda r: r["results"].pop(), "merge b: other shapes or routings than a"),
        (
            lambda r: r["results"][0]["arms"]["nccl_ep"].update(transport="nccl_ep 0.1.0"),
            "nccl_ep ran with transport nccl_ep 0.1.0, in a with torch",
        ),
    ],
)
def test_what_does_not_belong_together_is_not_merged(result, change, message, tmp_path, capsys):
    other = another(result)
    change(other)
    with pytest.raises(ValueError, match=message):
        merge({"a": result, "b": other})
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, content in zip(files, (result, other)):
        path.write_text(json.dumps(content))
    assert bench_dispatch.main(["--merge", *map(str, files), "--out", str(tmp_path / "c.json")]) == 1
    assert (
        capsys.readouterr().err.startswith(f"error: merge {files[1]}: ")
        and not (tmp_path / "c.json").exists()
    )


@pytest.mark.full
def test_a_measurement_is_not_merged_with_itself(result):
    with pytest.raises(ValueError, match="merge b: a measurement that a or another file holds already"):
        merge({"a": result, "b": result})


def made_up(times: dict[str, list[list[float]]], **static) -> dict:
    arms = {
        name: {"starts": [{"rounds_ms": {"cycle": rounds}} for rounds in starts], "static": static.get(name)}
        for name, starts in times.items()
    }
    return {"shape": "C", "routing": {"kind": "zipf"}, "arms": arms}


def test_a_direction_needs_starts_an_interval_and_quiet():
    fast, slow = [[1.0, 1.1, 1.05]] * 3, [[1.2, 1.3, 1.25]] * 3
    found = decide(made_up({"a": fast, "b": slow}), "a", "b")
    assert found["supported"] and found["low"] <= found["ratio"] <= found["high"] < 1
    assert found["ratio"] == pytest.approx(math.prod((1 / 1.2, 1.1 / 1.3, 1.05 / 1.25)) ** (1 / 3), abs=1e-4)
    assert in_words(found).startswith("C, zipf: a / b = 0.840 (")
    for arms, reason in (
        ({"a": fast[:2], "b": slow}, "2 start(s) of both, expected 3"),
        (
            {"a": fast, "b": [[1.2] * 3, [1.8] * 3, [1.2] * 3]},
            "the starts of b vary by 25 %, expected at most 5 %",
        ),
        ({"a": fast, "b": [[1.1, 1.0, 1.05]] * 3}, "the interval holds 1"),
    ):
        found = decide(made_up(arms), "a", "b")
        assert not found["supported"] and found["reasons"] == [reason]
    lossy = made_up({"a": fast, "b": slow}, a={"dropped_share": 0.1})
    assert decide(lossy, "a", "b")["reasons"] == ["a loses routes"]


def hash_of(rank: int, world: int) -> list[str]:
    found = []
    for seed in (1, 1, 2):
        routing = RoutingHash()
        for number in (0, 1, 0):
            routing.add(
                number, draw_routing("zipf", TINY, seed=seed, draw=number, rank=rank, world_size=world)
            )
        found.append(routing.value())
    assert dist.get_world_size() == world
    return found


def test_the_hash_is_of_what_was_drawn():
    first, second = ranks(2).run(hash_of)
    assert first == second and first[0] == first[1] != first[2]


@pytest.mark.full
def test_markdown_and_picture_of_a_merged_result(result, tmp_path: Path):
    merged = merge({"a": result, "b": another(result, arm="deep_ep")})
    for record in merged["results"]:
        add_statistics(record, against="alltoall")
    merged["emulated"] = bench_dispatch.emulated(merged)
    dispatch_report.draw(merged).savefig(tmp_path / "x.png")
    text = markdown(merged)
    assert "| `deep_ep` |" in text and "Ratio: cycle over that of `alltoall`" in text and "2 start(s)" in text
