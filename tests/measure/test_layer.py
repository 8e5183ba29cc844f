"""The layer benchmark in the rank pool, on tiny shapes; peers are not needed."""

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from sidestream.commands import bench_layer
from sidestream.measure import layer, peers
from sidestream.measure.arms import compose_layer
from sidestream.measure.layer import Job, run_job
from sidestream.measure.peak_memory import peak_growth
from sidestream.measure.problem import make_tokens, make_weights, route
from sidestream.measure.shapes import LayerShape, parse_case
from sidestream.profiling.rounds import order_of_round
from tests.rank_pool import ranks

ROOT = Path(__file__).parents[2]
TINY = LayerShape("tiny", 64, 32, 16, 4, 2)


def tiny_job(**changes):
    options = {
        "shapes": [TINY],
        "arms": ["sidestream/alltoall+grouped"],
        "peers": [],
        "dtype": "bf16",
        "rounds": 3,
        "warmup": 1,
        "frozen_rounds": 0,
        "skew": 0.0,
        "skew_order": "contiguous",
        "seed": 1,
        "conf": str(ROOT / "conf"),
    }
    return Job(**{**options, **changes})


def measure(rank, world, **changes):
    return run_job(tiny_job(**changes), say=lambda _: None)


def test_every_arm_has_every_place_equally_often():
    orders = [order_of_round(5, index, seed=3) for index in range(10)]
    assert all(sorted(order) == list(range(5)) for order in orders)
    for place in range(5):
        assert sorted(order[place] for order in orders) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert orders[0] == orders[1][::-1] and orders[0] != orders[2]
    assert orders == [order_of_round(5, index, seed=3) for index in range(10)]


def test_cases():
    assert parse_case("B@2").world_size == 2 and parse_case("B").shape.tokens == 4096
    assert parse_case("64,32,16,4,2").shape == LayerShape("64,32,16,4,2", 64, 32, 16, 4, 2)
    for text in ("F", "1,2,3", "A@3", "A@x", "8,8,8,2,4"):
        with pytest.raises(ValueError, match=f"shape={text}"):
            parse_case(text)


def test_rounding_to_bf16_turns_no_choice():
    weights = make_weights(
        TINY, dtype=torch.bfloat16, seed=1, skew=0.5, skew_order="shuffled", rank=0, world_size=1
    )
    x = make_tokens(TINY, weights.gate, dtype=torch.bfloat16, seed=1, draw=0, rank=0)
    exact, _ = route(x.float() @ weights.gate.t(), 2)
    rounded = torch.softmax((x @ weights.gate.bfloat16().t()), dim=-1).topk(2, dim=-1).indices
    assert torch.equal(exact.sort().values, rounded.sort().values)
    again = make_tokens(TINY, weights.gate, dtype=torch.bfloat16, seed=1, draw=0, rank=0)
    other = make_tokens(TINY, weights.gate, dtype=torch.bfloat16, seed=1, draw=1, rank=0)
    assert torch.equal(x, again) and not torch.equal(x, other)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.full
def test_two_ranks_without_peers(dtype):
    first, second = ranks(2).run(measure, dtype=dtype, frozen_rounds=2)
    (record,) = first
    arms = record["arms"]
    assert list(arms) == ["dense", "sidestream/alltoall+grouped"]
    ours = arms["sidestream/alltoall+grouped"]
    assert arms["dense"]["rounds_ms"] == second[0]["arms"]["dense"]["rounds_ms"]  # of the slowest rank
    assert len(ours["rounds_ms"]["forward"]) == 3 and len(ours["frozen_rounds_ms"]["forward"]) == 2
    assert all(b > f > 0 for f, b in zip(*ours["rounds_ms"].values()))
    assert set(ours["error"]) >= {"output", "x", "gate", "w_gate_up", "w_down"}
    assert arms["dense"]["bytes_on_wire"] == 0 and record["routing"]["rank_max_over_mean"] >= 1


def bytes_two_ways(rank, world):
    case = layer._build(tiny_job(), TINY, {})
    ours, x = case.arms[-1], case.tokens(0)
    with layer.CountBytes() as counter:
        ours.forward(x.requires_grad_()).backward(torch.ones_like(x))
    by_dispatcher = ours.module.parts.dispatcher.bytes_sent()
    ours.close()
    return counter.sent, by_dispatcher


def test_bytes_agree_with_the_dispatchers_own_count():
    for counted, by_dispatcher in ranks(2).run(bytes_two_ways):
        assert counted == by_dispatcher > 0


def test_left_out_and_refused():
    both = ["sidestream/local+grouped", "sidestream/alltoall+grouped"]
    record = ranks(2).run(measure, arms=both, rounds=1)[0][0]
    assert "all experts must be on one rank" in record["left_out"]["sidestream/local+grouped"]
    assert list(record["arms"]) == ["dense", "sidestream/alltoall+grouped"]
    with pytest.raises(ValueError, match="expected sidestream/<dispatcher>"):
        compose_layer(ROOT / "conf", TINY, "alltoall+grouped")
    cfg = compose_layer(ROOT / "conf", TINY, "sidestream/alltoall+grouped,fusion.alignment=8")
    assert cfg.fusion.alignment == 8 and cfg.router.top_k == 2


def test_static_arms():
    enough, too_small = (
        f"sidestream/nccl_ep+grouped,dispatcher.capacity_factor={factor}" for factor in (2.0, 0.5)
    )
    record = ranks(2).run(measure, arms=[enough, too_small], rounds=1)[0][0]
    assert list(record["arms"]) == ["dense", enough]
    arm = record["arms"][enough]
    assert arm["transport"] == "torch" and arm["static"]["budget_rows"] == 256
    assert arm["static"]["dropped_routes"] == 0 and 128 <= arm["static"]["needed_rows"] <= 256
    assert arm["bytes_on_wire"] < 2 * 64 * 32 * 2 * 4 + 4000  # rows there are, not rows there may be
    assert (
        " routes find no room in 64 rows per rank; expected dispatcher.capacity_factor="
        in (record["left_out"][too_small])
    )


def test_routing_is_a_name_for_a_skew(capsys):
    arguments = bench_layer.arguments
    assert arguments(["--routing", "zipf"]).skew == 1 and arguments(["--routing", "uniform"]).skew == 0
    for words, message in (
        (["--routing", "zipf", "--skew", "2"], "--routing: sets --skew"),
        (["--against", "megatron_allgather"], "--against megatron_allgather: expected dense, one of --arms"),
    ):
        with pytest.raises(SystemExit):
            arguments(words)
        assert message in capsys.readouterr().err
    assert arguments(["--against", "megatron/allgather", "dense"]).against == ["megatron/allgather", "dense"]


def with_wrong_weights(rank, world):
    right = layer.sidestream_arm

    def wrong(*args, **kwargs):
        arm = right(*args, **kwargs)
        with torch.no_grad():
            arm.module.experts.w_down[0] *= 1.5
        return arm

    layer.sidestream_arm = wrong
    try:
        run_job(tiny_job(), say=lambda _: None)
    except ValueError as error:
        return str(error)
    finally:
        layer.sidestream_arm = right
    return "accepted"


def test_an_arm_that_is_wrong_is_not_timed():
    for message in ranks(2).run(with_wrong_weights):
        assert "relative error of output" in message and "not timed" in message


def test_skew_loads_the_first_rank():
    record = ranks(2).run(measure, skew=2.0, rounds=1)[0][0]
    assert record["routing"]["rank_max_over_mean"] > 1.2


def test_a_missing_peer_ends_the_run_with_the_line_that_installs_it(monkeypatch, capsys, tmp_path):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ValueError, match=r"pip install --no-deps torchtitan==0\.3\.0"):
        peers.load("torchtitan")
    with pytest.raises(ValueError, match=r"pip install -e '\.\[peers\]'"):
        peers.load("megatron_alltoall")
    assert bench_layer.main(["--shapes", "A", "--peers", "tutel", "--out", str(tmp_path / "x.json")]) == 1
    assert "peers=tutel: expected all, none" in capsys.readouterr().err


def test_peers_that_cannot_compute_in_fp32():
    chosen, left_out = peers.choose(["all"], torch.float32)
    assert "torchtitan" not in chosen and "bfloat16" in left_out["torchtitan"]
    with pytest.raises(ValueError, match="--dtype bf16"):
        peers.choose(["torchtitan"], torch.float32)
    assert peers.choose(["none"], torch.float32) == ([], {})


def test_peak_memory_sees_an_allocation():
    growth = peak_growth(lambda: torch.ones(4 * 2**20))
    assert growth is None or 12 * 2**20 < growth < 40 * 2**20


@pytest.mark.shell
@pytest.mark.full
def test_the_script_starts_its_own_ranks(tmp_path, capfd):
    out = tmp_path / "bench.json"
    arguments = ["--shapes", "64,32,16,4,2@2", "--peers", "none", "--rounds", "2", "--warmup", "0"]
    assert bench_layer.main([*arguments, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["status"] == "finished" and result["peers"] == []
    assert result["results"][0]["arms"]["sidestream/alltoall+grouped"]["ratio_to_dense"]["min"] > 0
    assert result["results"][0]["fastest_peer"] is None
    assert out.with_suffix(".png").stat().st_size > 5000
    text = capfd.readouterr().out
    assert "peers: none" in text and "x dense" in text


@pytest.mark.full
@pytest.mark.shell
@pytest.mark.timeout(400)
def test_all_peers_agree_with_the_reference(tmp_path):
    for name, peer in peers.PEERS.items():
        try:
            installed = importlib.metadata.version(peer.package)
        except importlib.metadata.PackageNotFoundError:
            installed = None
        if installed != peer.version:
            pytest.skip(f"{name} is not installed: make peers")
    out = tmp_path / "bench.json"
    arguments = ["--shapes", "64,32,16,4,2", "64,32,16,4,2@2", "--rounds", "1", "--warmup", "0"]
    assert bench_layer.main([*arguments, "--out", str(out)]) == 0
    one, two = json.loads(out.read_text())["results"]
    assert sum(arm["kind"] == "peer" for arm in one["arms"].values()) == len(peers.PEERS)
    assert sum(arm["kind"] == "peer" for arm in two["arms"].values()) == len(peers.PEERS)
