"""The model against what this repository measured on two CPU ranks: layers, and what schedules hide.

Configs are composed as a user would write them, so that the whole way from the command line to the figure is tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig

from sidestream.predict.cluster import Cluster
from sidestream.predict.layer import Layer, expert_products, layer_seconds
from sidestream.predict.read import read
from sidestream.predict.residuals import Residual, residual
from sidestream.predict.schedules import Pass
from sidestream.predict.step import fused, step, unit_passes

Compose = Callable[..., DictConfig]  # overrides -> the root config of conf/predict.yaml
CPU = "cpu_2core"
DISPATCHERS = ("alltoall", "allgather", "nccl_ep")
CALIBRATED_AT = ("A", "B")  # shapes of which products and the activation were measured
BOTH_PASSES = 3  # products of forward and backward, in those of forward


def cpu_layers(result: dict[str, Any], cluster: Cluster, compose: Compose) -> list[Residual]:
    """Forward and backward of the shapes of scripts/bench_layer.py, of each dispatcher.

    Args:
        result: What the script wrote.
        cluster: The calibrated row.
        compose: See `Compose`.
    """
    rows = []
    for record in result["results"]:
        for dispatcher in DISPATCHERS:
            times = record["arms"][f"sidestream/{dispatcher}+grouped"]["forward_backward_ms"]
            layer = layer_of(record, dispatcher, compose)
            forward, backward = layer_seconds(layer, cluster)
            rows.append(
                residual(
                    times["median"],
                    1e3 * (forward.total + backward.total),
                    table="cpu_layer",
                    what=f"shape {record['shape']}, {dispatcher}",
                    cluster=CPU,
                    dispatcher=dispatcher,
                    model="",
                    ranks=record["world_size"],
                    math=result["precision"],
                    unit="ms",
                    source="docs/results/bench_layer_cpu.json",
                )
            )
    return rows


def beside_products(result: dict[str, Any], cluster: Cluster, compose: Compose) -> list[float]:
    """Relative errors of what a layer takes beside its products, which are most of it and easy."""
    errors = []
    for record in result["results"]:
        products = record["arms"]["gemm"]["forward_backward_ms"]["median"]
        for dispatcher in DISPATCHERS:
            measured = (
                record["arms"][f"sidestream/{dispatcher}+grouped"]["forward_backward_ms"]["median"] - products
            )
            layer = layer_of(record, dispatcher, compose)
            forward, backward = layer_seconds(layer, cluster)
            ours = forward.total + backward.total - BOTH_PASSES * expert_products(layer, cluster)
            errors.append(1e3 * ours / measured - 1)
    return errors


def cpu_fused(result: dict[str, Any], compose: Compose) -> list[Residual]:
    """Forward and backward of fused experts, at shapes of which nothing was calibrated."""
    rows = []
    precision = {"bf16": "bf16-mixed", "fp32": "32-true"}[result["precision"]]
    for record in result["results"]:
        asked = read(compose(*_sizes(record), "fusion=mega", f"trainer.precision={precision}"), name=CPU)
        both = [
            fused(seconds, asked.cluster)
            for seconds in layer_seconds(asked.job.layer(asked.cluster), asked.cluster)
        ]
        rows.append(
            residual(
                record["arms"]["sidestream/none+mega"]["forward_backward_ms"]["median"],
                1e3 * sum(seconds.total for seconds in both),
                table="cpu_fused",
                what=f"fusion=mega, {result['precision']}, T,D,F,E,K {record['shape']}",
                cluster=CPU,
                dispatcher="none",
                model="",
                ranks=record["world_size"],
                math=result["precision"],
                unit="ms",
                source=f"docs/results/bench_fusion_{result['precision']}.json",
            )
        )
    return rows


def layer_of(record: dict[str, Any], dispatcher: str, compose: Compose) -> Layer:
    """The layer of a record of the layer benchmark."""
    asked = read(compose(*_sizes(record), f"dispatcher={dispatcher}"), name=CPU)
    return asked.job.layer(asked.cluster)


def _sizes(record: dict[str, Any]) -> list[str]:
    """Overrides that make a model with one layer of a record of the layer benchmark."""
    return [
        f"cluster={CPU}",
        f"cluster.num_gpus={record['world_size']}",
        "model=tiny",
        f"model.hidden_size={record['hidden_size']}",
        f"model.expert_hidden_size={record['expert_hidden_size']}",
        f"model.num_experts={record['num_experts']}",
        f"router.top_k={record['top_k']}",
        f"data.seq_length={record['tokens']}",
        f"strategy.expert_parallel_size={record['expert_parallel_size']}",
    ]


def cpu_overlap(result: dict[str, Any], compose: Compose) -> list[Residual]:
    """E_hide of every row of the overlap page; the error is the difference, since E_hide is a share already."""
    rows = []
    for run in result["runs"]:
        ours = overlap_of(result, run, compose).e_hide
        found = residual(
            run["e_hide"],
            ours,
            table="cpu_overlap",
            what=f"E_hide of {run['schedule']}, {run['compute']} compute, {run['comm_share']:.0%} communication",
            cluster=CPU,
            dispatcher="nccl_ep",
            model="",
            ranks=result["expert_parallel_size"],
            math="fp32",
            unit="",
            source="docs/results/overlap_matrix.json",
        )
        rows.append(replace(found, published=round(run["e_hide"], 4), error=round(ours - run["e_hide"], 4)))
    return rows


def overlap_of(result: dict[str, Any], run: dict[str, Any], compose: Compose) -> Pass:
    """The unit of a row, forward and backward, on the link that the row had."""
    shape = result["shape"]
    cfg = compose(
        f"cluster={CPU}",
        "model=tiny",
        "trainer.precision=32-true",
        "dispatcher=nccl_ep",
        f"model.hidden_size={shape['hidden_size']}",
        f"model.expert_hidden_size={shape['expert_hidden_size']}",
        f"model.ffn_hidden_size={shape['ffn_hidden_size']}",
        f"data.seq_length={shape['seq_length']}",
        f"data.micro_batch_size={shape['tokens_per_rank'] // shape['seq_length']}",
        f"data.global_batch_size={result['world_size'] * shape['tokens_per_rank'] // shape['seq_length']}",
        f"strategy.expert_parallel_size={result['expert_parallel_size']}",
        f"overlap={run['schedule']}",
        "link=throttled",
        f"link.gbps={run['link_gbps']}",
        "link.latency_us=0",
    )
    asked = read(cfg, name=CPU)
    forward, backward = unit_passes(asked.job, asked.cluster, asked.job.shape.moe_blocks[0])
    return forward + backward


def flops(row: dict[str, Any], compose: Compose) -> Residual:
    """Training FLOP per token of a preset, against published TFLOP/s over tokens/s."""
    cfg = compose(
        f"model={row['model']}", f"model.num_mtp_layers={row['mtp']}", f"data.seq_length={row['seq_length']}"
    )
    asked = read(cfg, name="h100")
    published = 1e3 * row["tflops_per_gpu"] / row["tokens_per_second_per_gpu"]
    return residual(
        round(published, 3),
        step(asked.job, asked.cluster).flops_per_token / 1e9,
        table="flops",
        what=f"{row['model']}{', MTP' if row['mtp'] else ''}, {row['row']}",
        cluster="",
        dispatcher="",
        model=row["model"],
        ranks=1,
        math="",
        unit="GFLOP/token",
        source=row["source"],
    )


def whole_step(row: dict[str, Any], compose: Compose) -> Residual:
    """Tokens per second and GPU of a published training run."""
    options = dict(one.split("=", 1) for one in row["overrides"])
    asked = read(compose(*row["overrides"]), name=options["cluster"])
    chosen = ["graph" if asked.job.in_graph else "", "interleaved" if asked.job.interleaved else ""]
    return residual(
        row["tokens_per_second_per_gpu"],
        step(asked.job, asked.cluster).tokens_per_second_per_gpu,
        table="step",
        what=", ".join(
            [
                row["model"],
                asked.cluster.name,
                f"{asked.cluster.num_gpus} GPUs, EP {asked.job.expert_parallel_size}",
                asked.dispatcher,
                *filter(None, chosen),
            ]
        ),
        cluster=asked.cluster.name,
        dispatcher=asked.dispatcher,
        model=row["model"],
        ranks=asked.job.expert_parallel_size,
        math=asked.job.math,
        unit="tokens/s per GPU",
        source=f"{row['release']}: {row['source']}",
    )
