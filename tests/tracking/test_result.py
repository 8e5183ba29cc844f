import pytest

from sidestream.tracking.folder import RunFolder
from sidestream.tracking.result import Baselines, Metrics, RunResult, minimal_failed_result

KEYS = {
    "schema_version": None,
    "status": None,
    "command": None,
    "choices": None,
    "device": None,
    "world_size": None,
    "expert_parallel_size": None,
    "transport": None,
    "link": None,
    "seed": None,
    "precision": None,
    "data_checksum": None,
    "eos_token": None,
    "params_total": None,
    "params_active": None,
    "flops_per_token": None,
    "changes_model": None,
    "data": {
        "documents": {"train": None, "val": None},
        "tokens": {"train": None, "val": None},
        "dropped": {},
        "replaced_characters": None,
        "zero_bytes": None,
        "separators": None,
        "shared_documents": None,
        "notes": None,
    },
    "metrics": {
        "train_loss": None,
        "val_loss": None,
        "tokens": None,
        "tokens_per_second": None,
        "step_ms": None,
        "waited_share": None,
        "mfu": None,
        "peak_tflops": None,
        "peak_source": None,
        "peak_memory_bytes": None,
        "bytes_on_wire": None,
        "baselines": {"bigram": None, "trigram": None},
    },
    "overflow": {
        "events": None,
        "replays": None,
        "dropped": None,
        "budget": None,
        "recommended_factor": None,
    },
    "overlap": {
        "compute_ms": None,
        "comm_ms": None,
        "serial_ms": None,
        "overlapped_ms": None,
        "e_hide": None,
        "e_comm": None,
        "bound": None,
    },
    "graph": {
        "backend": None,
        "captures": None,
        "replays": None,
        "eager": None,
        "capture_seconds": None,
        "nbytes": None,
        "lint": None,
    },
    "versions": None,
    "commit": None,
    "error": None,
}


def keys(result):
    """The shape of a result: its nested keys, apart from the free ones of choices and versions."""
    free = ("choices", "versions")
    return {k: keys(v) if isinstance(v, dict) and k not in free else None for k, v in result.items()}


@pytest.fixture
def running():
    return RunResult(
        status="running",
        command="python train.py seed=3",
        choices={"dispatcher": "alltoall"},
        world_size=2,
        metrics=Metrics(tokens=100, baselines=Baselines(bigram=2.5)),
    ).as_dict()


def test_every_result_has_exactly_the_stable_keys(running):
    failed = minimal_failed_result(None, error="rank 1 died")
    for result in (
        RunResult(status="finished").as_dict(),
        running,
        failed,
        minimal_failed_result(running, error="x"),
    ):
        assert keys(result) == KEYS


def test_unknown_values_are_null_and_infinities_too(tmp_path):
    result = RunResult(status="finished", seed=3, metrics=Metrics(val_loss=float("inf"))).as_dict()
    RunFolder(tmp_path).write_result(result)
    back = RunFolder(tmp_path).read_result()
    assert back == result
    assert back["seed"] == 3
    assert back["metrics"]["val_loss"] is None
    assert back["schema_version"] == 1


def test_there_is_no_result_before_one_is_written(tmp_path):
    assert RunFolder(tmp_path).read_result() is None


def test_unknown_key_and_status_are_refused():
    with pytest.raises(TypeError):
        RunResult(status="finished", sed=3)
    with pytest.raises(AssertionError):
        RunResult(status="done")


def test_a_failed_result_keeps_what_the_running_one_knew(running):
    result = minimal_failed_result(
        running, error="rank 1 was killed (SIGKILL)", command="other", choices={"a": "b"}, world_size=9
    )
    assert result == {**running, "status": "failed", "error": "rank 1 was killed (SIGKILL)"}


def test_a_failed_result_without_a_running_one_says_what_the_supervisor_knows():
    result = minimal_failed_result(
        None, error="x", status="interrupted", command="python train.py", choices={"a": "b"}, world_size=2
    )
    assert (result["status"], result["command"], result["world_size"]) == (
        "interrupted",
        "python train.py",
        2,
    )
    assert result["choices"] == {"a": "b"}
