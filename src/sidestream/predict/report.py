"""A prediction as text for a terminal, and as JSON."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from sidestream.model.account import account
from sidestream.predict.layer import Seconds
from sidestream.predict.predict import Prediction, link_of
from sidestream.predict.residuals import Residual
from sidestream.report.table import Table, numbers

SCHEMA_VERSION = 1
NAMES = {
    "route": "route, sort, launch",
    "counts": "row counts (wire)",
    "pack": "pack",
    "dispatch": "dispatch (wire)",
    "unpack": "order by expert",
    "experts": "experts",
    "gather": "sum of a token's rows",
    "combine": "combine (wire)",
    "add": "add up",
}


# One rule of packing, and one speed of the libraries: nothing in the model tells these apart.
ALIKE = ("nccl_ep", "deep_ep", "hybrid_ep")


def same_model_as(choices: dict[str, str]) -> list[str]:
    """The other dispatchers that the model gives the same figures to, where their libraries run as this one's does."""
    chosen = choices.get("dispatcher")
    return [name for name in ALIKE if name != chosen] if chosen in ALIKE else []


def same_figures(choices: dict[str, str]) -> str:
    """The same in words; empty if the dispatcher has figures of its own."""
    if not (others := same_model_as(choices)):
        return ""
    told = f"{choices['dispatcher']} from {' and '.join(others)}"
    return f"the model does not tell {told}: the same figures stand for each"


def text(found: Prediction, *, choices: dict[str, str]) -> str:
    """The page that `predict.py` prints."""
    return "\n\n".join(
        [
            "\n".join(_head(found, choices)),
            *(table.plain() for table in tables(found)),
            "\n".join(_verdict(found, choices)),
        ]
    )


def _head(found: Prediction, choices: dict[str, str]) -> list[str]:
    asked, job, cluster = found.asked, found.asked.job, found.asked.cluster
    counted = account(job.shape, top_k=job.routes.top_k, seq_length=job.seq_length)
    groups = (
        "" if job.routes.num_groups == 1 else f" in {job.routes.top_groups} of {job.routes.num_groups} groups"
    )
    stages = (
        ""
        if job.pipeline_stages == 1
        else f", {job.pipeline_stages} pipeline stages of {job.virtual_stages} parts"
    )
    chosen = [
        f"{group}={choices[group]}"
        for group in ("dispatcher", "overlap", "fusion", "graph")
        if group in choices
    ]
    return [
        f"cluster  {cluster.name}: {cluster.num_gpus} {'GPUs' if cluster.kind == 'gpu' else 'ranks'}, "
        f"{cluster.gpus_per_domain} to a domain",
        f"model    {choices.get('model', '?')}: {counted.params_total / 1e9:.4g} B parameters, "
        f"{counted.params_active / 1e9:.3g} B active; top-{job.routes.top_k} of {job.routes.num_experts}{groups}; "
        f"{counted.flops_per_token / 1e9:.4g} GFLOP a token",
        f"layout   expert_parallel_size {job.expert_parallel_size}, copies of an expert "
        f"{job.expert_data_parallel_size}{stages}; {job.micro_batch_size} x {job.seq_length} tokens a micro-batch, "
        f"{job.micro_batches} a step; {job.math} products",
        f"choices  {' '.join(chosen)} ({asked.job.mover.packing.replace('_', ' ')} packing, wire {job.dispatch_wire} / "
        f"{job.combine_wire})",
    ]


def tables(found: Prediction) -> list[Table]:
    """A layer, a unit under its schedule, a step, and the memory of a rank: name, figures, remark."""
    job, unit, step, needed = found.asked.job, found.step.unit, found.step, found.memory
    name = job.schedule_name if not job.interleaved else "interleaved micro-batches"
    gain = f"{unit.serial / unit.seconds:.2f} x its serial run, E_hide {unit.e_hide:.2f}"
    parts = {words: [getattr(seconds, part) for seconds in step.layer] for part, words in NAMES.items()}
    parts["total"] = [seconds.total for seconds in step.layer]
    layer = Table(
        ["", *numbers("forward", "backward")],
        [(words, *map(_ms, both)) for words, both in parts.items()],
        title="one MoE layer, one part after another, ms",
    )
    hidden = [("hidden by the schedule", "-" + _ms(step.hidden), "")] if step.hidden else []
    exposed = (
        f"exposed: dispatch and combine {step.exposed / step.seconds:.1%}, gradients and spread weights "
        f"{step.reduction / step.seconds:.1%}"
    )
    peak = f"{found.peak_share:.0%} of the {job.math} peak"
    sizes = {item.name: getattr(needed, item.name) for item in fields(needed) if item.name != "available"}
    return [
        layer,
        Table(
            ["", *numbers(""), ""],
            [
                ("compute", _ms(unit.compute), ""),
                ("dispatch and combine", _ms(unit.communication), ""),
                ("serial", _ms(unit.serial), ""),
                ("scheduled", _ms(unit.seconds), gain),
                ("exposed", _ms(unit.exposed), ""),
            ],
            title=f"one MoE unit under overlap={name}, forward and backward, ms",
        ),
        Table(
            ["", *numbers(""), ""],
            [
                *((part.name, _ms(part.seconds), "") for part in step.parts if part.seconds),
                *hidden,
                ("step", _ms(step.seconds), exposed),
                ("tokens/s per GPU", f"{step.tokens_per_second_per_gpu:,.0f}", ""),
                ("TFLOP/s per GPU", f"{step.flops_per_gpu / 1e12:.4g}", peak),
            ],
            title="one step, ms",
        ),
        Table(
            ["", *numbers("")],
            [(part, f"{size / 1e9:.4g}") for part, size in {**sizes, "total": needed.total}.items()],
            title=f"memory of a rank, GB of {needed.available / 1e9:.4g}",
        ),
    ]


def _verdict(found: Prediction, choices: dict[str, str]) -> list[str]:
    lines = [f"what binds: {found.binds}"]
    if alike := same_figures(choices):
        lines.append(alike)
    if found.asked.job.expert_parallel_size > 1:
        lines.append(f"an exchange is as fast as the {link_of(found.asked)}")
    if found.published:
        lines += _published(found)
    rows = "published rows" if found.asked.cluster.kind == "gpu" else "rows measured here"
    lines.append(f"the model's error on the nearest {rows} (docs/predictor.md has all):")
    lines += [
        f"  {row.error:+7.1%}  {row.what}: {row.predicted:.4g} for {row.published:.4g} {row.unit}"
        for row in found.nearest
    ]
    if found.asked.cluster.kind == "gpu":
        lines.append("nothing here was measured on this cluster by us")
    return lines


def _published(found: Prediction) -> list[str]:
    assert found.published is not None
    measured = found.published["tokens_per_second_per_gpu"]
    ours = found.step.tokens_per_second_per_gpu
    return [
        f"published: {measured:,.0f} tokens/s per GPU; predicted {ours:,.0f} ({ours / measured - 1:+.1%})",
        f"  source: {found.published['source']}",
        f"  dispatcher: {found.published['why']}",
    ]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds < 1 else f"{1e3 * seconds:.1f}"


def record(found: Prediction, *, command: str, choices: dict[str, str]) -> dict[str, Any]:
    """The JSON beside the picture. Names as in `result.json`, times in ms, sizes in bytes."""
    step, job, unit = found.step, found.asked.job, found.step.unit
    forward, backward = step.layer
    return {
        "schema_version": SCHEMA_VERSION,
        "prediction": "step",
        "command": command,
        "choices": choices,
        "cluster": found.asked.cluster.name,
        "num_gpus": step.gpus,
        "expert_parallel_size": job.expert_parallel_size,
        "pipeline_stages": job.pipeline_stages,
        "tokens": step.tokens,
        "flops_per_token": step.flops_per_token,
        "metrics": {
            "step_ms": 1e3 * step.seconds,
            "tokens_per_second": step.tokens_per_second_per_gpu * step.gpus,
            "tokens_per_second_per_gpu": step.tokens_per_second_per_gpu,
            "tflops_per_gpu": step.flops_per_gpu / 1e12,
            "mfu": found.peak_share,
            "exposed_share": step.exposed / step.seconds,
            "exposed_reduction_share": step.reduction / step.seconds,
        },
        "layer_ms": {"forward": _parts(forward), "backward": _parts(backward)},
        "overlap": {
            "compute_ms": 1e3 * unit.compute,
            "comm_ms": 1e3 * unit.communication,
            "serial_ms": 1e3 * unit.serial,
            "overlapped_ms": 1e3 * unit.seconds,
            "e_hide": unit.e_hide,
        },
        "step_ms": {part.name: 1e3 * part.seconds for part in step.parts} | {"hidden": -1e3 * step.hidden},
        "memory_bytes": {item.name: getattr(found.memory, item.name) for item in fields(found.memory)},
        "binds": found.binds,
        "same_model_as": same_model_as(choices),
        "published": found.published,
        "nearest_published": [_row(row) for row in found.nearest],
    }


def _parts(seconds: Seconds) -> dict[str, float]:
    return {name: 1e3 * getattr(seconds, name) for name in NAMES} | {"total": 1e3 * seconds.total}


def _row(row: Residual) -> dict[str, Any]:
    return asdict(row)
