"""The compatibility check: which layouts follow, and what is refused in which words."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from sidestream.config import devices
from sidestream.config.compatibility import check, moe_blocks
from sidestream.config.errors import ConfigError, as_typed
from sidestream.config.hydra_errors import explain, is_of_user

Compose = Callable[..., DictConfig]


def refusal(compose: Compose, *overrides: str, **world: int) -> str:
    with pytest.raises(Exception) as refused:
        check(compose(*overrides), **{"device_count": 0, **world})
    assert is_of_user(refused.value)
    line = explain(refused.value, list(overrides))
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("overrides", "world_size", "numbers"),
    [
        (["model.num_experts=6", "strategy.expert_parallel_size=4"], 4, ("=4", "num_experts=6")),
        (["strategy.expert_parallel_size=4", "data.global_batch_size=6"], 6, ("=4", "world size 6")),
        (["strategy.expert_parallel_size=4"], 2, ("=4", "world size 2")),
        (["strategy.expert_parallel_size=0"], 2, ("=0", "auto or one of 1, 2")),
        (["router.top_k=9"], 2, ("=9", "num_experts=8")),
        (["router.top_k=0"], 2, ("=0", "num_experts=8")),
    ],
)
def test_impossible_layouts_are_refused_naming_both_numbers(
    compose: Compose, overrides: list[str], world_size: int, numbers: tuple[str, str]
):
    line = refusal(compose, *overrides, world_size=world_size)
    assert all(number in line for number in numbers), line
    assert "; expected " in line
    assert "; set " in line


def test_a_possible_layout_works(compose: Compose):
    layout = check(compose("strategy.expert_parallel_size=2"), world_size=2, device_count=0)
    assert (layout.expert_parallel_size, layout.expert_data_parallel_size) == (2, 1)
    assert (layout.micro_batch_size, layout.accumulation, layout.device_type) == (4, 1, "cpu")


def test_normalised_top_1_is_refused(compose: Compose):
    line = refusal(compose, "router.top_k=1", "router.normalize=true")
    assert line.startswith("router.normalize=true: with router.top_k=1")
    assert line.endswith("set router.normalize=auto")
    check(compose("router.top_k=1"), device_count=0)


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        (["model.mla.q_lora_rank=8"], "model.mla.q_lora_rank=8: null in this option"),
        (["model.mla={a:1}"], "model.mla={a:1}: null in this option"),
        # Beside a key of such a part another one is wrong, or the part is there.
        (["model.mla=null", "model.traniable=1"], "model.traniable=1: no such key"),
        (
            ["model=deepseek_v3", "model.mla.q_lora_rank=8", "optimizer.lr=abc"],
            "optimizer.lr=abc: not a number",
        ),
        (["model=deepseek_v3", "model.mla.q_rank=8"], "model.mla.q_rank=8: no such key"),
    ],
)
def test_the_key_that_is_wrong_is_named_beside_a_part_that_may_be_null(
    compose: Compose, overrides: list[str], start: str
) -> None:
    assert refusal(compose, *overrides).startswith(start)


def test_null_may_be_typed_where_it_stands(compose: Compose) -> None:
    check(compose("model.mla=null"), device_count=0)


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        ([], 1, 1),
        ([], 4, 4),
        (["data.global_batch_size=6"], 6, 2),
        (["model.num_experts=6", "data.global_batch_size=12"], 4, 2),
        (["dispatcher=local"], 4, 1),
        (["model=tiny_dense"], 4, 1),
    ],
)
def test_auto_is_the_largest_group_that_fits(
    compose: Compose, overrides: list[str], world_size: int, expected: int
):
    layout = check(compose(*overrides), world_size=world_size, device_count=0)
    assert layout.expert_parallel_size == expected
    assert layout.expert_data_parallel_size == world_size // expected


@pytest.mark.parametrize(
    ("overrides", "start", "end"),
    [
        # renamed keys, also with +
        (["model.top_k=1"], "model.top_k=1:", "set router.top_k=1"),
        (["+model.top_k=1"], "model.top_k=1:", "set router.top_k=1"),
        (["ep=2"], "ep=2:", "set strategy.expert_parallel_size=2"),
        (["data.batch_size=4"], "data.batch_size=4:", "set data.global_batch_size=4"),
        (["model.n_experts=4"], "model.n_experts=4:", "set model.num_experts=4"),
        (["model.seq_length=4"], "model.seq_length=4:", "set data.seq_length=4"),
        (
            ["trainer.accumulate_grad_batches=2"],
            "trainer.accumulate_grad_batches=2:",
            "data.micro_batch_size=<value>",
        ),
        (
            ["+trainer.accumulate_grad_batches=2"],
            "trainer.accumulate_grad_batches=2:",
            "micro_batch_size=<value>",
        ),
        # unknown keys and options
        (["router.topk=1"], "router.topk=1: no such key; expected one of router.top_k", ""),
        (["+router.topk=1"], "router.topk=1: no such key; expected one of router.top_k", ""),
        (["+bogus=1"], "bogus=1: no such key", ""),
        (["num_experts=4"], "num_experts=4: no such key; expected one of model.num_experts", ""),
        (
            ["dispatcher=all2all"],
            "dispatcher=all2all: no such option; expected one of allgather, alltoall, deep_ep, hybrid_ep, local, ",
            "=alltoall",
        ),
        (
            ["strategy=fully_shard", "trainer.precision=bf16-true"],
            "trainer.precision=bf16-true: this strategy shards",
            "set trainer.precision=bf16-mixed",
        ),
        # keys of an option that is not chosen, typed or left over from an experiment
        (
            ["balance.update_rate=0.1"],
            "balance.update_rate=0.1: only another option of balance has this key; expected it beside balance=bias",
            "set balance=bias",
        ),
        (["overlap.num_chunks=3"], "overlap.num_chunks=3: only another option of", "set overlap=chunked"),
        (
            ["experiment=bias_balance", "balance=aux_loss"],
            "balance.update_rate=...: only another option of",
            "set balance=bias",
        ),
        # parts of a group of keys that is null
        (
            ["model.mla.kv_lora_rank=4"],
            "model.mla.kv_lora_rank=4: null in this option",
            "set model=deepseek_v3",
        ),
        (
            ["model.mla={q_lora_rank:1,kv_lora_rank:4}"],
            "model.mla={q_lora_rank:1,kv_lora_rank:4}: null in this",
            "set model=deepseek_v3",
        ),
        # wrong values
        (["model.num_layers=abc"], "model.num_layers=abc: not an integer", ""),
        (["model.num_layers=null"], "model.num_layers=null: may not be null", ""),
        (["model.num_layers=2147483647"], "model.num_layers=2147483647: out of range", "num_layers=4"),
        (["model.num_heads=2147483647"], "model.num_heads=2147483647: out of range", "num_heads=4"),
        (["model.num_layers=0"], "model.num_layers=0: out of range; expected a value >= 1", "num_layers=4"),
        (["optimizer.lr=nan"], "optimizer.lr=nan: out of range", ""),
        (["optimizer.betas={x:1}"], "optimizer.betas={x:1}: not a list", ""),
        (["model.full_attention_layers={x:1}"], "model.full_attention_layers={x:1}: not a list", ""),
        (
            ["data=huggingface", "data.dataset=text", "data.data_files=[[1]]"],
            "data.data_files=[[1]]: not a flat list",
            "",
        ),
        (["trainer.peak_tflops={x:1}"], "trainer.peak_tflops={'x': 1}: not a number", "=auto"),
        (
            ["callbacks.overlap_report.every_n_steps={x:1}"],
            "callbacks.overlap_report.every_n_steps={'x': 1}: not an integer",
            "every_n_steps=auto",
        ),
        (["optimizer.betas=3"], "optimizer.betas=3: not a list", ""),
        (["strategy.expert_parallel_size=abc"], "strategy.expert_parallel_size=abc: not an integer", "=auto"),
        (
            ["router.normalize=maybe"],
            "router.normalize=maybe: not a choice; expected one of auto, true",
            "=auto",
        ),
        (
            ["trainer.peak_tflops=fast"],
            "trainer.peak_tflops=fast: not a number; expected auto or a number",
            "trainer.peak_tflops=auto",
        ),
        (["trainer.peak_tflops=0"], "trainer.peak_tflops=0: out of range; expected a value > 0", "=auto"),
        (
            ["trainer.precision=16"],
            "trainer.precision=16: not a choice; expected one of 32-true",
            "=bf16-mixed",
        ),
        (["model.num_layers=[1"], "model.num_layers=[1:", ""),
        (["data.cache_dir=${nope}"], "data.cache_dir=${nope}: Interpolation key 'nope' not found", ""),
        # the model
        (["model.moe_layers=0"], "model.moe_layers=0: with model.num_layers=4", "set model.moe_layers=[]"),
        (["model.moe_layers=[1,4]"], "model.moe_layers=[1,4]: not distinct blocks of model.num_layers=4", ""),
        (["model.moe_layers=all"], "model.moe_layers=all: neither an integer nor a list", ""),
        (["model.num_heads=3"], "model.num_heads=3: does not cut model.hidden_size=128", "num_heads=2"),
        (
            ["model.num_kv_heads=3"],
            "model.num_kv_heads=3: does not divide model.num_heads=4",
            "num_kv_heads=1",
        ),
        # the world
        (
            ["data.global_batch_size=3"],
            "data.global_batch_size=3: not divisible by the world size 2",
            "size=4",
        ),
        (["data.micro_batch_size=3"], "data.micro_batch_size=3: does not divide the 4 sequences", "size=1"),
        (
            ["dispatcher=local", "strategy.expert_parallel_size=2"],
            "strategy.expert_parallel_size=2:",
            "=alltoall",
        ),
        (
            ["model=tiny_dense", "strategy.expert_parallel_size=2"],
            "strategy.expert_parallel_size=2:",
            "size=1",
        ),
        (["trainer.accelerator=gpu"], "trainer.accelerator=gpu: no NVIDIA GPU is visible", "accelerator=cpu"),
        (["trainer.num_nodes=2"], "trainer.num_nodes=2: this command starts ranks on one machine", ""),
        # classes and folders
        (
            ["optimizer._target_=os.system"],
            "optimizer._target_=os.system: this class is not",
            "if you trust it",
        ),
        (
            ["trusted_targets=[nowhere]", "router._target_=nowhere.R"],
            "router._target_=nowhere.R: nowhere cannot",
            "",
        ),
        (["router._target_=sidestreamx.R"], "router._target_=sidestreamx.R: this class is not", ""),
        (["paths.cache_dir=/dev/null/x"], "paths.cache_dir=/dev/null/x: /dev/null cannot be written", ""),
        *(
            ([f"{key}=/proc/x"], f"{key}=/proc/x: /proc cannot be written", f"set {key}=<folder>")
            for key in ("paths.log_dir", "paths.cache_dir", "data.cache_dir")
        ),
    ],
)
def test_a_mistake_is_one_line_with_key_value_reason_and_way_out(
    compose: Compose, overrides: list[str], start: str, end: str
):
    line = refusal(compose, *overrides)
    assert line.startswith(start), line
    assert line.endswith(end), line


def test_a_missing_data_folder_of_a_users_option_is_named(compose: Compose, tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text(
        "_target_: sidestream.data.text.TextFiles\nroot: /not/there\nseq_length: 8\nglobal_batch_size: 8\n"
    )
    line = refusal(compose, "data=mine", f"hydra.searchpath=[file://{tmp_path}]")
    assert line.startswith("data.root=/not/there: missing or unreadable")


@pytest.mark.parametrize(
    ("overrides", "world_size", "fits"),
    [
        ([], 4, True),
        (["trainer.devices=4"], 4, True),
        (["trainer.devices=2"], 4, False),
        (["trainer.devices=2", "trainer.num_nodes=2"], 4, True),
    ],
)
def test_torchruns_world_has_to_be_the_one_asked_for(
    compose: Compose, overrides: list[str], world_size: int, fits: bool
):
    if fits:
        assert check(compose(*overrides), world_size=world_size, device_count=0).world_size == world_size
    else:
        assert "world size 4 of torchrun" in refusal(compose, *overrides, world_size=world_size)


@pytest.mark.parametrize(
    ("overrides", "gpus", "world_size", "device"),
    [
        ([], 0, 2, "cpu"),
        ([], 4, 4, "cuda"),
        (["trainer.devices=1"], 4, 1, "cuda"),
        (["trainer.accelerator=cpu"], 4, 2, "cpu"),
    ],
)
def test_devices_auto_takes_all_gpus_or_two_cpu_ranks(
    compose: Compose, overrides: list[str], gpus: int, world_size: int, device: str
):
    layout = check(compose(*overrides), device_count=gpus)
    assert (layout.world_size, layout.device_type) == (world_size, device)


def test_more_ranks_than_gpus_are_refused(compose: Compose):
    assert "2 GPUs are visible" in refusal(compose, "trainer.devices=4", device_count=2)


@pytest.mark.parametrize(
    ("visible", "installed", "count"),
    [(None, 4, 4), ("", 4, 0), ("-1", 4, 0), ("0,2", 4, 2), ("0,-1,1", 4, 1), ("0,1", 0, 0), ("MIG-a", 1, 1)],
)
def test_visible_gpus(monkeypatch: pytest.MonkeyPatch, visible: str | None, installed: int, count: int):
    monkeypatch.setattr(devices, "_installed", lambda: installed)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.count_gpus() == count


def test_accumulation_follows_from_the_batch_sizes(compose: Compose):
    layout = check(compose("data.micro_batch_size=2"), world_size=2, device_count=0)
    assert (layout.micro_batch_size, layout.accumulation) == (2, 2)


def test_moe_blocks():
    assert moe_blocks(4, 2) == [1, 3]
    assert moe_blocks(4, 1) == [0, 1, 2, 3]
    assert moe_blocks(4, [3, 0]) == [0, 3]
    assert moe_blocks(4, []) == []


def test_config_errors_travel_between_processes():
    error = ConfigError("a.b", None, "why", expected="expected 2", fix="a.b=2")
    assert str(error) == "a.b=null: why; expected 2; set a.b=2"
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.key) == (str(error), "a.b")


def test_a_refusal_is_one_line_whatever_a_file_says():
    line = str(ConfigError("a.b", "x\ny\x1b[2J", "why\r", expected="this", fix="a.b=1"))
    assert line == "a.b=x\\ny\\x1b[2J: why\\r; expected this; set a.b=1"


def test_values_are_shown_as_they_are_typed():
    shown = [as_typed(value) for value in (None, True, [1, None], "a", 0.1)]
    assert shown == ["null", "true", "[1,null]", "a", "0.1"]
