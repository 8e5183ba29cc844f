"""`--wandb` against a small double of the public API; no server is asked."""

from typing import Any

import pytest

from sidestream.compare import wandb_runs
from sidestream.compare.arms import compare
from sidestream.compare.errors import CompareError
from sidestream.compare.figures import figures
from sidestream.tracking import names


class FakeRun:
    def __init__(self, overlap: str, seed: int, *, state: str = "finished", **identity: Any) -> None:
        self.id, self.name, self.state, self.loss = (
            f"id{overlap}{seed}",
            f"train-{overlap}",
            state,
            3.0 - 0.1 * seed,
        )
        self.config = {
            "_wandb": {"cli_version": "x"},
            "seed": seed,
            "model": {"hidden_size": 64},
            "overlap": {"_target_": f"sidestream.overlap.{overlap}"},
            "link": {"_target_": "sidestream.exchange.link.NativeLink"},
            "trainer": {"precision": "32-true", "log_every_n_steps": 5},
            "choices": {"overlap": overlap, "link": "native"},
            "world_size": 2,
            "expert_parallel_size": 2,
            "expert_data_parallel_size": 1,
            "commit": "abc",
            "torch": "2.13.0",
            "gpu": None,
            "overrides": [f"seed={seed}"],
            "data_checksum": "d",
            **identity,
        }

    def scan_history(self):
        loss = self.loss - (0.5 if self.config["choices"]["overlap"] == "chunked" else 0.0)
        yield {"_step": 0, "moe/expert_load": {"_type": "image"}}
        for step in (5, 10, 15):
            yield {
                "_step": step,
                "trainer/global_step": step,
                names.TOKENS: 100 * step,
                names.TRAIN_LOSS: loss + 1,
                names.STEP_MS: 10.0,
                names.TOKENS_PER_SECOND: 1e4,
                names.VAL_LOSS: None,
            }
            yield {"_step": step, "trainer/global_step": step, names.TOKENS: 100 * step, names.VAL_LOSS: loss}


class FakeApi:
    def __init__(self, *runs: FakeRun) -> None:
        self.of, self.asked = runs, []

    def runs(self, path: str, **options: Any):
        self.asked.append((path, options))
        return iter(self.of)


def test_a_group_is_compared():
    api = FakeApi(*(FakeRun(overlap, seed) for overlap in ("none", "chunked") for seed in (1, 2)))
    runs, left_out = wandb_runs.read("me/sidestream", "sweep-1", api=api)
    assert api.asked == [("me/sidestream", {"filters": {"group": "sweep-1"}, "order": "+created_at"})]
    found = compare(runs, left_out=left_out)
    none, chunked = figures(found)
    assert found.title == "Comparison of overlap"
    assert chunked.differences["val_loss"].mean == pytest.approx(-0.5)
    assert (none.flat["step_ms"], none.flat["world_size"], none.flat["tokens"]) == (10.0, 2, 1500)
    assert found.notes == ("Not recorded in any run, so not checked: transport, cpu.",)


@pytest.mark.parametrize(
    ("key", "identity"),
    [("commit", {"commit": "def"}), ("model.hidden_size", {"model": {"hidden_size": 128}})],
)
def test_unfair_pairs_are_refused_there_too(key: str, identity: dict[str, Any]):
    runs, _ = wandb_runs.read("a/b", "g", api=FakeApi(FakeRun("none", 1), FakeRun("chunked", 1, **identity)))
    with pytest.raises(CompareError, match=rf"^{key}="):
        compare(runs)


def test_runs_that_did_not_finish_are_left_out():
    _, left_out = wandb_runs.read("a/b", "g", api=FakeApi(FakeRun("none", 1, state="crashed")))
    assert [(item.name, item.reason) for item in left_out] == [
        ("train-none (idnone1)", "status crashed in wandb")
    ]


def test_an_empty_group_and_a_server_that_fails_are_one_line():
    with pytest.raises(CompareError, match=r"^group=g: no run of a/b is in it"):
        wandb_runs.read("a/b", "g", api=FakeApi())

    class Down:
        def runs(self, path: str, **options: Any):
            raise RuntimeError("no such project\nand a long story")

    with pytest.raises(CompareError) as refused:
        wandb_runs.read("a/b", "g", api=Down())
    assert str(refused.value).startswith("wandb=a/b: no such project; expected")
