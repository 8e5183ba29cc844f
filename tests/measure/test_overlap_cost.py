"""scripts/overlap_cost.py: both arms run in every round, in alternating order, and compute the same."""

from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from sidestream.config.schema import register
from tests.docs.pages import script
from tests.rank_pool import ranks

SMALL = [
    "model.hidden_size=64",
    "model.ffn_hidden_size=64",
    "model.expert_hidden_size=64",
    "data.seq_length=16",
]


def arms(rank: int, world: int) -> dict[str, Any]:
    overlap_cost = script("scripts/overlap_cost.py")
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(overlap_cost.CONF.absolute())):
        cfg = compose("train", ["overlap=chunked", "dispatcher=nccl_ep", "trainer.devices=1", *SMALL])
    OmegaConf.resolve(cfg)
    work, order = overlap_cost.unit_of(cfg), []
    run = work.run

    def noted(name: str) -> None:
        order.append((work.model.schedule.enabled, name))
        run(name)

    work.run = noted
    return {"times": overlap_cost.rounds_of(work, rounds=2, warmup=0), "order": order}


def test_both_arms_run_in_every_round_and_change_places() -> None:
    (found,) = ranks(1).run(arms)
    assert {arm: len(times) for arm, times in found["times"].items()} == {"serial": 2, "overlapped": 2}
    assert [overlapped for overlapped, name in found["order"] if name == "forward"] == [
        True,
        False,
        False,
        True,
    ]
