"""The model against published figures and against this repository's own measurements; see docs/predictor.md."""

from __future__ import annotations

import json
from statistics import mean
from typing import Any

import pytest

from sidestream.predict import residuals
from sidestream.predict.residuals import Residual, mean_error
from tests.docs.pages import script

predict_residuals = script("tools/predict_residuals.py")


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Every leaf by its path."""
    if isinstance(value, dict):
        return {
            key: leaf for part, inner in value.items() for key, leaf in flat(inner, f"{name}.{part}").items()
        }
    if isinstance(value, list):
        return {
            key: leaf
            for part, inner in enumerate(value)
            for key, leaf in flat(inner, f"{name}.{part}").items()
        }
    return {name: value}


@pytest.fixture(scope="module")
def everything() -> Any:
    return predict_residuals.everything()


@pytest.fixture(scope="module")
def tables(everything: Any) -> dict[str, list[Residual]]:
    rows = everything.rows
    return {
        table: [row for row in rows if row.table == table]
        for table in dict.fromkeys(row.table for row in rows)
    }


@pytest.mark.full
def test_flops_per_token(tables: dict[str, list[Residual]]) -> None:
    assert len(tables["flops"]) == 19
    for row, published in zip(tables["flops"], predict_residuals.published("flops")):
        # NVIDIA's tables round the sequences per second of all GPUs to a whole number: 87 of them on eight GPUs.
        sequences = published["tokens_per_second_per_gpu"] * published["num_gpus"] / published["seq_length"]
        rounded = "card" not in published["row"] and abs(sequences - round(sequences)) < 1e-3
        assert abs(row.error) <= max(0.004, 0.5 / sequences if rounded else 0.0), row.what
    cards = [row for row in tables["flops"] if "card" in row.what]
    assert len(cards) == 2 and max(abs(row.error) for row in cards) <= 1e-4


def test_bandwidths_of_the_libraries(tables: dict[str, list[Residual]]) -> None:
    assert len(tables["bandwidth"]) == 32
    assert mean_error(tables["bandwidth"]) <= 0.05
    # HybridEP on two nodes is the one that the model does not explain.
    outside = [row for row in tables["bandwidth"] if abs(row.error) > 0.12]
    assert {row.what for row in outside} == {
        f"HybridEP, H100, {what}, EP 16" for what in ("dispatch", "combine")
    }


def test_bandwidths_that_the_reference_predicts(tables: dict[str, list[Residual]]) -> None:
    """Worked out there by hand: physical rate times N / (N - 1)."""
    predicted = {row.what: row.predicted for row in tables["bandwidth"]}
    assert predicted["DeepEP V1, H800, dispatch, EP 8"] == pytest.approx(154, abs=0.5)
    assert predicted["DeepEP V1, H800, combine, EP 16"] == pytest.approx(47, abs=0.5)  # bound by NVLink
    assert predicted["DeepEP V2, B200, dispatch, EP 8"] == pytest.approx(720, abs=0.5)
    assert predicted["HybridEP, H100, combine, EP 64"] == pytest.approx(51.4, abs=0.1)
    assert predicted["HybridEP, GB200, dispatch, EP 36"] == pytest.approx(648, abs=0.5)


def test_single_layers_on_h100(tables: dict[str, list[Residual]]) -> None:
    assert len(tables["layer"]) == 24
    assert mean_error(tables["layer"]) <= 0.065
    # One set of constants for all rows: the machine's.
    assert {row.cluster for row in tables["layer"]} == {"h100"}


def test_layers_of_a_model_that_no_constant_saw(everything: Any) -> None:
    left_out = {one.model: one for one in everything.left_out}
    assert left_out["mixtral"].mean <= 0.05 and left_out["deepseek"].mean <= 0.12
    # A fit does better on what it saw; otherwise it is no fit.
    assert all(one.fitted < one.mean * 1.3 for one in left_out.values())


def test_published_steps(tables: dict[str, list[Residual]]) -> None:
    """Nothing was fitted to these. What the page says of them, so that a change is noticed."""
    deepseek_and_qwen = [row for row in tables["step"] if not row.model.startswith("gpt_oss")]
    assert len(tables["step"]) == 31 and len(deepseek_and_qwen) == 21
    assert mean_error(deepseek_and_qwen) <= 0.15
    assert mean_error(tables["step"]) <= 0.3


def test_layers_on_this_kind_of_cpu(everything: Any, tables: dict[str, list[Residual]]) -> None:
    """Calibrated by single kernels; of the shapes, A and B gave the sizes of two of them, C, D and E none."""
    assert len(tables["cpu_layer"]) == 15
    unseen = [
        row for row in tables["cpu_layer"] if row.what.split(",")[0] in ("shape C", "shape D", "shape E")
    ]
    assert len(unseen) == 9
    assert mean_error(unseen) <= 0.25 and mean_error(tables["cpu_layer"]) <= 0.25
    # What a layer takes beside its products, which are most of it.
    assert mean(map(abs, everything.beside_products)) <= 0.25


def test_fused_layers_on_this_kind_of_cpu(tables: dict[str, list[Residual]]) -> None:
    assert len(tables["cpu_fused"]) == 4 and mean_error(tables["cpu_fused"]) <= 0.15


def test_measured_overlap(tables: dict[str, list[Residual]]) -> None:
    assert len(tables["cpu_overlap"]) == 24
    assert max(abs(row.error) for row in tables["cpu_overlap"]) <= 0.1


def test_what_predictions_quote_is_what_comes_out(everything: Any) -> None:
    written = json.loads(residuals.FILE.read_text(encoding="utf-8"))
    again = json.loads(json.dumps(everything.to_json()))
    old, new = flat(written), flat(again)
    fix = "run `python tools/predict_residuals.py --write && make readme`"
    assert old.keys() == new.keys(), fix
    for name, value in new.items():
        same = (
            value == old[name]
            if isinstance(value, str)
            else value == pytest.approx(old[name], rel=1e-6, abs=2e-4)
        )
        assert same, f"{name}: {fix}"


def test_every_table_has_its_sources() -> None:
    for name in ("flops", "bandwidth", "layers", "steps"):
        assert all(len(row["source"]) > 20 for row in predict_residuals.published(name))


def test_the_nearest_row_is_the_most_alike() -> None:
    rows = residuals.load()

    def first(**asked: Any) -> str:
        return residuals.nearest(rows, **asked, most=1)[0].what

    for cluster in (
        "gb200_nvl72",
        "gb300_nvl72",
    ):  # of the second nothing is published, and the first is its kin
        assert "GB200" in first(
            table="bandwidth",
            cluster=cluster,
            dispatcher="nccl_ep",
            model="deepseek_v3",
            ranks=32,
            math_="bf16",
        )
    assert first(
        table="layer", cluster="h100", dispatcher="deep_ep", model="mixtral", ranks=8, math_="fp8"
    ).startswith("mixtral-shaped layer, deep_ep, fp8")
    assert first(
        table="step",
        cluster="gb300_nvl72",
        dispatcher="hybrid_ep",
        model="qwen3_30b_a3b",
        ranks=8,
        math_="mxfp8",
    ).startswith("qwen3_30b_a3b, gb300_nvl72")
