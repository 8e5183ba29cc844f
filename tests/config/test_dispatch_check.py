"""A dispatcher's own keys, and the limits of a library that are known before anything starts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import DictConfig

from sidestream.config.availability import Machine
from sidestream.config.compatibility import check
from sidestream.config.errors import ConfigError
from tests.config.machines import H100, H100_HYBRID

Compose = Callable[..., DictConfig]
BF16 = "trainer.precision=bf16-mixed"
PAD = ("router.expert_capacity_factor=1.25", "router.pad_to_capacity=true")
MOVING = ("alltoall", "allgather", "nccl_ep", "deep_ep", "hybrid_ep")


@pytest.fixture
def refusal(compose: Compose, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Returns a function from a machine and overrides to the error's line, "" if there is none."""

    def check_there(machine: Machine, *overrides: str, **world: int) -> str:
        monkeypatch.setattr(Machine, "here", classmethod(lambda cls: machine))
        try:
            check(compose(*overrides), device_count=machine.gpus, **world)
        except ConfigError as error:
            return str(error)
        return ""

    return check_there


@pytest.mark.parametrize("option", MOVING)
@pytest.mark.parametrize(
    ("overrides", "start", "end"),
    [
        (
            ["dispatcher.alignment=24"],
            "dispatcher.alignment=24: the libraries pad",
            "set dispatcher.alignment=32",
        ),
        (["dispatcher.alignment=0"], "dispatcher.alignment=0: out of range", "set dispatcher.alignment=1"),
        (
            ["dispatcher.capacity_factor=1.5", *PAD],
            "dispatcher.capacity_factor=1.5: router.pad_to_capacity=true",
            "set dispatcher.capacity_factor=null",
        ),
        (  # without the factor the graph was refused, which asked for it back
            ["graph=step", "dispatcher.capacity_factor=1.5", *PAD],
            "dispatcher.capacity_factor=1.5: router.pad_to_capacity=true",
            "set router.pad_to_capacity=false",
        ),
        (["dispatcher.capacity_factor=0"], "dispatcher.capacity_factor=0.0: out of range", ""),
        (
            ["dispatcher.on_overflow=stop"],
            "dispatcher.on_overflow=stop: not a choice; expected one of replay",
            "",
        ),
        (["dispatcher.alignment=16", "dispatcher.capacity_factor=0.1"], "", ""),
        (["dispatcher.alignment=1", *PAD], "", ""),
    ],
)
@pytest.mark.sample(8)
def test_keys_that_every_moving_dispatcher_has(
    refusal: Callable[..., str], option: str, overrides: list[str], start: str, end: str
):
    line = refusal(Machine(), f"dispatcher={option}", *overrides)
    assert line.startswith(start) and line.endswith(end), line
    assert bool(line) == bool(start), line


@pytest.mark.parametrize("option", ["nccl_ep", "deep_ep", "hybrid_ep"])
@pytest.mark.parametrize(
    ("overrides", "start", "end"),
    [
        (["dispatcher.transport=torch"], "", ""),
        (["dispatcher.transport=auto"], "", ""),
        (
            ["dispatcher.transport=torch", "model.hidden_size=144"],
            "dispatcher.wire_dtype=mxfp8: 32 values share a scale, and model.hidden_size=144 is no multiple",
            "set dispatcher.wire_dtype=model",
        ),
        (
            ["dispatcher.transport=library"],
            "dispatcher.wire_dtype=mxfp8: the libraries have 8-bit formats of their own",
            "set dispatcher.transport=torch",
        ),
    ],
)
@pytest.mark.sample(4)
def test_the_8_bit_wire(refusal: Callable[..., str], option: str, overrides: list[str], start: str, end: str):
    line = refusal(Machine(), f"dispatcher={option}", "dispatcher.wire_dtype=mxfp8", *overrides)
    assert line.startswith(start) and line.endswith(end), line
    assert bool(line) == bool(start), line


def test_the_8_bit_wire_is_refused_where_auto_takes_the_library(refusal: Callable[..., str]):
    wide = ("dispatcher=nccl_ep", "dispatcher.wire_dtype=mxfp8", "model.hidden_size=256")
    assert refusal(H100, *wide).startswith("dispatcher.wire_dtype=mxfp8: the libraries have 8-bit formats")
    assert refusal(H100, *wide, "dispatcher.transport=torch") == ""


NCCL, DEEP, HYBRID = (
    ("dispatcher=nccl_ep", "dispatcher.transport=library"),
    ("dispatcher=deep_ep", "dispatcher.transport=library", BF16, "model.hidden_size=256"),
    ("dispatcher=hybrid_ep", "dispatcher.transport=library", BF16),
)


@pytest.mark.parametrize(
    ("machine", "overrides", "start", "end"),
    [
        (H100, [*NCCL], "", ""),
        (H100, [*NCCL, "dispatcher.capacity_factor=1.5"], "", ""),
        (H100, [*DEEP], "", ""),
        (H100_HYBRID, [*HYBRID], "", ""),
        # a row
        (H100, [*NCCL, "model.hidden_size=72", "model.num_heads=2", "model.num_kv_heads=2"], "", ""),
        (
            H100,
            [*NCCL, BF16, "model.hidden_size=68", "model.num_heads=2", "model.num_kv_heads=2"],
            "model.hidden_size=68: 68 values in a row, and NCCL EP takes multiples of 8",
            "set dispatcher.transport=torch",
        ),
        (H100, [*NCCL, "model.hidden_size=68", "model.num_heads=2", "model.num_kv_heads=2"], "", ""),  # fp32
        (
            H100,
            [*DEEP, "model.hidden_size=384"],
            "model.hidden_size=384: 384 values in a row, and DeepEP v2",
            "",
        ),
        (H100_HYBRID, [*HYBRID, "model.hidden_size=136"], "model.hidden_size=136: 136 values in a row", ""),
        (
            H100,
            [*NCCL, "model.hidden_size=16640"],
            "model.hidden_size=16640: 16640 values in a row, and NCCL EP",
            "",
        ),
        # values
        (
            H100,
            [*DEEP, "trainer.precision=32-true"],
            "trainer.precision=32-true: DeepEP v2 moves 16-bit values only",
            "set trainer.precision=bf16-mixed",
        ),
        (
            H100_HYBRID,
            [*HYBRID, "trainer.precision=32-true"],
            "trainer.precision=32-true: HybridEP moves 16-bit",
            "",
        ),
        (H100, [*DEEP, "trainer.precision=bf16-true"], "", ""),
        # tokens
        (
            H100,
            [*NCCL, "data.seq_length=2048", "data.global_batch_size=64"],
            "data.micro_batch_size=auto: 16384 tokens per rank, and NCCL EP takes 8192; expected at most 8192 tokens",
            "set data.micro_batch_size=4",
        ),
        (
            H100,
            [*NCCL, "data.seq_length=2048", "data.global_batch_size=64", "data.micro_batch_size=4"],
            "",
            "",
        ),
        (
            H100,
            [*NCCL, "data.seq_length=2048", "data.global_batch_size=48"],  # 6 sequences per rank
            "data.micro_batch_size=auto: 12288 tokens per rank",
            "set data.micro_batch_size=3",
        ),
        (
            H100,
            [*NCCL, "data.seq_length=16384"],
            "data.micro_batch_size=auto: 16384 tokens per rank",
            "set dispatcher.transport=torch",
        ),
        (
            H100,
            [*NCCL, "data.seq_length=8192", *PAD],
            "data.micro_batch_size=auto: 18432 tokens per rank",  # 8192 and 10240 that fill experts up
            "",
        ),
        # experts
        (H100, [*NCCL, "model.num_experts=2048"], "", ""),
        (
            H100,
            [*NCCL, "model.num_experts=2056"],
            "model.num_experts=2056: 257 experts per rank, and NCCL EP takes 256",
            "set dispatcher.transport=torch",
        ),
        (
            H100,
            [*DEEP, "model.num_experts=2056"],
            "model.num_experts=2056: 2056 experts, and DeepEP v2 takes 2048",
            "",
        ),
        (
            H100,
            [*DEEP, "model.num_experts=64", "router.top_k=33"],
            "router.top_k=33: 33 experts per token",
            "",
        ),
        (
            replace(H100, gpus=2),
            [*NCCL, "model.num_experts=6"],
            "model.num_experts=6: 6 experts on one machine, and NCCL EP takes multiples of 4",
            "set dispatcher.transport=torch",
        ),
        (replace(H100, gpus=2), [*NCCL, "model.num_experts=12"], "", ""),
        (replace(H100, gpus=2), [*DEEP, "model.num_experts=6"], "", ""),
        # padding
        (
            H100,
            [*NCCL, "fusion.alignment=24"],
            "fusion.alignment=24: NCCL EP pads the rows of an expert to powers of two",
            "set fusion.alignment=32",
        ),
        (
            H100,
            [*DEEP, "fusion.alignment=24"],
            "fusion.alignment=24: DeepEP v2 pads",
            "set fusion.alignment=32",
        ),
        (H100, ["dispatcher=deep_ep", "dispatcher.transport=torch", "fusion.alignment=24"], "", ""),
        # the wire
        (
            H100,
            [*NCCL, "link=throttled"],
            "link=throttled: NCCL EP moves rows itself, where a link cannot slow it",
            "set dispatcher.transport=torch",
        ),
        (H100, ["dispatcher=nccl_ep", "link=throttled", "dispatcher.transport=torch"], "", ""),
        # a static buffer: 256 tokens, top-2
        (
            H100,
            [*NCCL, "dispatcher.capacity_factor=0.3"],
            "dispatcher.capacity_factor=0.3: a buffer of 192 rows, and NCCL EP wants room for the 256 tokens",
            "set dispatcher.capacity_factor=0.5",
        ),
        (H100, [*NCCL, "dispatcher.capacity_factor=0.5"], "", ""),
        (H100, [*NCCL, "dispatcher.capacity_factor=0.3", "dispatcher.alignment=256"], "", ""),
        (H100, [*DEEP, "dispatcher.capacity_factor=0.3"], "", ""),
        # the transport that runs is what counts
        (
            H100,
            ["dispatcher=nccl_ep", "dispatcher.capacity_factor=0.3"],
            "dispatcher.capacity_factor=0.3",
            "",
        ),
        (
            H100,
            ["dispatcher=nccl_ep", "dispatcher.capacity_factor=0.3", "dispatcher.transport=torch"],
            "",
            "",
        ),
    ],
)
@pytest.mark.sample(8)
def test_limits_of_a_library(
    refusal: Callable[..., str], machine: Machine, overrides: list[str], start: str, end: str
):
    line = refusal(machine, *overrides)
    assert line.startswith(start) and line.endswith(end), line
    assert bool(line) == bool(start), line


@pytest.mark.parametrize(("local_world_size", "fits"), [(2, False), (4, True)])
def test_fewer_tokens_where_ranks_are_on_several_machines(
    refusal: Callable[..., str], local_world_size: int, fits: bool
):
    overrides = (*HYBRID, "data.seq_length=21888", "data.global_batch_size=4")
    line = refusal(H100_HYBRID, *overrides, world_size=4, local_world_size=local_world_size)
    assert line.startswith(
        "" if fits else "data.micro_batch_size=auto: 21888 tokens per rank, and HybridEP takes 21844"
    )
    assert (line == "") == fits


def test_experts_are_counted_where_all_ranks_share_a_machine(refusal: Callable[..., str]):
    overrides = (*NCCL, "model.num_experts=6", "data.global_batch_size=6", "strategy.expert_parallel_size=6")
    line = refusal(H100, *overrides, world_size=6, local_world_size=6)
    assert line.startswith("model.num_experts=6: 6 experts on one machine, and NCCL EP takes multiples of 4")
    assert refusal(H100, *overrides, world_size=6, local_world_size=3) == ""


def test_a_users_own_dispatcher_may_have_other_keys_of_the_same_name(
    compose: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(tmp_path)
    methods = "".join(f"    def {name}(self, *_): ...\n" for name in ("dispatch", "combine"))
    (tmp_path / "my_pkg.py").write_text(
        f"class Mine:\n    def __init__(self, alignment, transport, wire_dtype): ...\n{methods}"
    )
    (tmp_path / "dispatcher").mkdir()
    (tmp_path / "dispatcher" / "mine.yaml").write_text(
        "_target_: my_pkg.Mine\nalignment: 24\ntransport: library\nwire_dtype: mxfp8\n"
    )
    cfg = compose("dispatcher=mine", "trusted_targets=[my_pkg]", f"hydra.searchpath=[file://{tmp_path}]")
    check(cfg, device_count=0)


def test_our_class_in_a_users_option_may_leave_its_keys_out(refusal: Callable[..., str], tmp_path: Path):
    (tmp_path / "dispatcher").mkdir()
    (tmp_path / "dispatcher" / "mine.yaml").write_text(
        "_target_: sidestream.dispatch.nccl_ep.NcclEPDispatcher\ncapacity_factor: 0.3\n"
    )
    mine = ("dispatcher=mine", f"hydra.searchpath=[file://{tmp_path}]")
    assert refusal(Machine(), *mine) == ""
    assert refusal(H100, *mine).startswith("dispatcher.capacity_factor=0.3: a buffer of 192 rows")
