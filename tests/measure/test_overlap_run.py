"""scripts/measure_overlap.py without its processes: from the config to the files of the run folder."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from sidestream.config.compatibility import check
from sidestream.config.errors import ConfigError
from sidestream.config.layout import Layout
from sidestream.launch import entry
from sidestream.launch.record import Launch
from sidestream.launch.worker import RankEnv
from sidestream.measure.overlap_run import table
from sidestream.profiling.picture import draw
from sidestream.tracking.result import RunResult
from tests.rank_pool import ranks
from tests.train.fit import CONF

MICRO = [
    "model.hidden_size=64",
    "model.ffn_hidden_size=64",
    "model.expert_hidden_size=64",
    "model.num_experts=4",
    "data.seq_length=16",
    "trainer.pin_cpu=false",
    "trainer.accelerator=cpu",
    "trainer.devices=2",
    "measure.rounds=2",
    "measure.warmup=0",
]


def measure(
    rank: int, world: int, cfg: dict[str, Any], layout: dict[str, Any], folder: str
) -> dict[str, Any]:
    from sidestream.measure import overlap_run

    env = RankEnv(rank, rank, world, world, "file:///not-used")
    return overlap_run.measure(OmegaConf.create(cfg), layout=Layout(**layout), folder=Path(folder), env=env)


def run(folder: Path, *overrides: str) -> dict[str, Any]:
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("measure_overlap", [*MICRO, *overrides])
    layout = check(cfg, device_count=0)
    (folder / ".hydra").mkdir(parents=True)
    choices = {"overlap": "two_batch", "dispatcher": "alltoall", "link": "throttled"}
    Launch(command="python x", overrides=[], flags=[], choices=choices, layout=layout).save(folder)
    plain = OmegaConf.to_container(cfg, resolve=True)
    return ranks(2).run(measure, cfg=plain, layout=asdict(layout), folder=str(folder))[0]


@pytest.mark.full
def test_the_files_of_a_measurement(tmp_path: Path):
    out = tmp_path / "elsewhere"
    result = run(
        tmp_path / "run",
        "overlap=two_batch",
        "dispatcher=nccl_ep",
        "dispatcher.capacity_factor=0.5",
        "link=throttled",
        "measure.compute=sleep",
        "measure.comm_share=0.5",
        f"measure.out={out}",
        "measure.trace=true",
    )
    assert sorted(path.name for path in out.iterdir()) == [
        "overlap.json",
        "overlap.png",
        "overlap.svg",
        "trace_rank0.json",
        "trace_rank1.json",
    ]
    assert result == json.loads((tmp_path / "run" / "result.json").read_text())
    assert result.keys() == RunResult(status="finished").as_dict().keys()
    record = json.loads((out / "overlap.json").read_text())
    assert record["overlap"] == result["overlap"]
    assert all(value is not None for value in result["overlap"].values())
    assert list(record["passes"]) == ["forward", "backward", "both"]
    both = record["passes"]["both"]
    assert list(both["rounds_ms"]) == ["compute", "communication", "serial", "overlapped"]
    assert all(len(rounds) == 2 for rounds in both["rounds_ms"].values())
    assert (record["transport"], record["link"]) == ("torch", "throttled") and record["link_gbps"] > 0
    told = " ".join(record["emulated"])
    assert all(word in told for word in ("wire", "sleep", "one machine"))
    title = " ".join(record["picture"]["title"])
    assert all(
        word in title for word in ("two_batch", "transport torch", "Gbit/s", "64 features", "emulated")
    )
    lanes = {(bar["lane"], bar["name"]) for bar in record["picture"]["overlapped"]["ranks"][0]}
    assert {("compute", "attention"), ("compute", "experts"), ("communication", "combine")} <= lanes
    assert len(draw(record["picture"]).axes) == 2
    events = json.loads((out / "trace_rank0.json").read_text())["traceEvents"]
    assert {"serial", "overlapped", "experts", "experts backward"} <= {event.get("name") for event in events}


@pytest.mark.full
def test_a_step_without_a_throttled_link(tmp_path: Path):
    result = run(tmp_path / "run", "overlap=none", "measure.scope=step", "data.micro_batch_size=2")
    record = json.loads((tmp_path / "run" / "overlap.json").read_text())
    assert list(record["passes"]) == ["step"]
    assert result["overlap"]["bound"] in (0.0, None)
    assert any("serial and overlapped are one run" in line for line in record["remarks"])
    lines = table(record)
    assert "one training step" in lines[0] and "link=native" in lines[1]
    assert lines[-2].split()[0] == "step" and "E_hide of single rounds" in lines[-1]


def test_a_length_for_a_part_that_is_not_there(tmp_path: Path):
    with pytest.raises(AssertionError, match=r"sleep_ms.shared_up=3.0: this schedule has no such part"):
        run(tmp_path / "run", "overlap=chunked", "measure.compute=sleep", "measure.sleep_ms.shared_up=3")


def test_a_library_is_refused():
    entry.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("measure_overlap", [*MICRO, "dispatcher=nccl_ep", "dispatcher.transport=library"])
    with pytest.raises(ConfigError):
        check(cfg, device_count=0)
