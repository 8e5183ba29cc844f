"""What a rank says that waited for others in vain: one line with place, group, missing ranks and the setting."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sidestream.exchange import ops
from sidestream.fusion.mega.window_memory import PeerLost
from sidestream.launch import failures, phase, waiting
from sidestream.launch.failures import Failure
from sidestream.launch.waiting import LostExchange

pytestmark = pytest.mark.timeout(30)

GLOO = "[/pytorch/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 7000ms for send operation to complete"
MEMBERS = "expert-parallel group, ranks 0, 1"


@pytest.fixture
def rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process is rank 0 of 2 in training step 3, rank 1 has another process and is a transfer behind."""
    other = (
        "from pathlib import Path; import sys; from sidestream.launch import phase\n"
        "phase.open_file(Path(sys.argv[1]), 1); phase.enter(phase.TRAINING, step=3)\n"
        "phase.beat('dispatch')"
    )
    subprocess.run([sys.executable, "-c", other, str(tmp_path)], timeout=20, check=True)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", phase.SCRATCH: str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    phase.open_file(tmp_path, 0)
    phase.set_timeout(7)
    phase.enter(phase.TRAINING, step=3)
    while phase.current().beats <= phase.read(tmp_path, 1).beats:
        phase.beat("combine")
    yield tmp_path
    phase.open_file(None, 0)
    phase.set_timeout(0)
    phase.enter(phase.STARTING)


def test_a_time_out_names_transfer_layer_group_rank_and_setting(rank_0: Path):
    told = waiting.explain(LostExchange("combine of MoE layer 2", MEMBERS, [0, 1], GLOO))
    assert told == (
        "no answer within 7 s in: training step 3, combine of MoE layer 2 (expert-parallel group, ranks 0, 1); "
        "missing: rank 1 (in: training step 3 (dispatch)); if it was only slow, set strategy.timeout_seconds=14"
    )


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO),
        RuntimeError("wait timeout after 7000ms, keys: /default_pg/0//cpu//0/rank_1"),
        RuntimeError("Wait timeout"),  # of a store that is a file
        RuntimeError("Socket Timeout"),
        RuntimeError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"),
        PeerLost("fusion=mega: rank 1 of the expert-parallel group did not answer within 7 s"),
    ],
)
def test_every_wait_is_told_like_that(rank_0: Path, error: RuntimeError):
    phase.beat("the check of the step")
    told = waiting.explain(error)
    assert told is not None
    assert told.startswith(
        "no answer within 7 s in: training step 3, the check of the step; missing: rank 1 ("
    )
    failure = failures.record(rank_0, rank=0, error=error)
    assert (failure.error, failure.traceback, failure.follows_another) == (told, "", True)
    assert type(error).__name__ in (rank_0 / "rank0.log").read_text()


@pytest.mark.parametrize(
    "error",
    [ValueError("Timed out waiting 7000ms"), RuntimeError("Connection closed by peer"), OSError("timed out")],
)
def test_other_errors_stay_as_they_are(rank_0: Path, error: Exception):
    assert waiting.explain(error) is None


def test_where_ranks_share_no_folder_the_group_is_told(rank_0: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(phase.SCRATCH)
    monkeypatch.setenv("WORLD_SIZE", "4")
    told = waiting.explain(LostExchange("dispatch", "", [0, 2, 3], GLOO))
    assert told is not None
    assert "missing: one of ranks 2, 3;" in told


@pytest.mark.parametrize("what", ["has ended", "has failed", "did not answer within 7 s"])
def test_a_lost_peer_is_never_the_cause(what: str):
    lost = Failure(0, 1.0, f"PeerLost: fusion=mega: rank 1 of the expert-parallel group {what}")
    died = failures.died(Path("run"), 1, -9, phase.Phase(phase.TRAINING, 12))
    assert failures.cause([lost, died]) is died
    assert died.error.startswith("killed by SIGKILL (often: out of memory), in: training step 12; see ")


@pytest.mark.parametrize(("layer", "where"), [(3, "dispatch of MoE layer 3"), (None, "dispatch")])
def test_a_transfer_knows_where_it_failed(layer: int | None, where: str):
    class Late:
        def wait(self) -> None:
            raise RuntimeError(GLOO)

    channel, out, ticket = ops.Channel(None), torch.zeros(1), ops.new_ticket(layer)
    channel.members, channel.ranks = MEMBERS, [0, 1]
    channel._in_flight[ticket] = ops._InFlight(Late(), out, out, None, "dispatch", 0.0, 0, 0)  # type: ignore[arg-type]
    with pytest.raises(LostExchange) as lost:
        ops.wait_(out, channel.id, ticket)
    assert (lost.value.where, lost.value.members, lost.value.ranks) == (where, MEMBERS, [0, 1])
    channel.close()
