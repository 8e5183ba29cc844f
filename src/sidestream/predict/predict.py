"""A prediction: what is asked, what it takes, whether it fits, and how wrong the model was on rows like it.

asked  = read(cfg)                     sizes and machine; refused if they cannot be laid out
step   = step(job, cluster)            seconds
memory = memory(job, cluster)          bytes; refused if they do not fit
rows   = nearest(published rows)       the model's error
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from sidestream.config.errors import ConfigError
from sidestream.model.account import forward_flops
from sidestream.predict import residuals
from sidestream.predict.job import Job
from sidestream.predict.memory import Memory, memory
from sidestream.predict.read import Asked, read
from sidestream.predict.residuals import Residual
from sidestream.predict.step import Step, step, unit_of


@dataclass(frozen=True)
class Prediction:
    """Everything that is said of a config."""

    asked: Asked
    step: Step
    memory: Memory
    binds: str
    nearest: tuple[Residual, ...]
    published: dict[str, Any] | None

    @property
    def peak_share(self) -> float:
        """Model FLOP per second over the peak of the products' precision."""
        cluster, math = self.asked.cluster, self.asked.job.math
        efficiency = cluster.gemm_efficiency if math in ("fp32", "bf16") else cluster.gemm_efficiency_8bit
        return self.step.flops_per_gpu / (cluster.products(math) / efficiency)


def predict(cfg: DictConfig, *, cluster: str, model: str) -> Prediction:
    """Predict a config.

    Args:
        cfg: Composed as conf/predict.yaml.
        cluster, model: Names of the options, of which published rows are looked for.

    Raises:
        ConfigError: It cannot be laid out, or does not fit.
    """
    asked = read(cfg, name=cluster)
    needed = memory(asked.job, asked.cluster)
    if not needed.fits:
        raise too_large(asked, needed)
    predicted = step(asked.job, asked.cluster)
    published = cfg.predict.published
    return Prediction(
        asked=asked,
        step=predicted,
        memory=needed,
        binds=binding(asked, predicted),
        nearest=tuple(_nearest(asked, model)),
        published=None if published is None else dict(published),
    )


def binding(asked: Asked, predicted: Step) -> str:
    """What would have to be faster for the step to be."""
    parts = {part.name: part.seconds for part in predicted.parts}
    parts.pop("MoE units, dispatch and combine")
    inside = "MoE units, compute"
    # A fused path waits for its transfers inside of what counts as compute.
    parts[inside] -= predicted.exposed if asked.job.fused else 0.0
    name, seconds = max(parts.items(), key=lambda item: item[1])
    if predicted.exposed > seconds:
        return (
            f"the {link_of(asked)}: what of dispatch and combine is exposed takes longer than any other part"
        )
    return f"compute in MoE units: {_largest_in_unit(asked)}" if name == inside else name


def _largest_in_unit(asked: Asked) -> str:
    """The part of a typical MoE unit that computes longest, forward and backward together."""
    job, cluster = asked.job, asked.cluster
    flops = forward_flops(job.shape, top_k=job.routes.top_k, seq_length=job.seq_length)
    assert job.work is not None
    unit = unit_of(job.with_work(job.work.plain), cluster, flops, job.shape.moe_blocks[-1])
    forward, backward = unit.moe

    def both(*names: str) -> float:
        return sum(getattr(one, name) for one in (forward, backward) for name in names)

    parts = {
        "attention": unit.attention.total,
        "the shared expert": unit.shared.total,
        "the experts' products": both("experts"),
        "routing and launching": both("route"),
        "passes over rows": both("pack", "unpack", "gather", "add"),
    }
    return max(parts, key=lambda name: parts[name])


def link_of(asked: Asked) -> str:
    """The link that decides how long an exchange takes."""
    cluster, layer = asked.cluster, asked.job.layer(asked.cluster)
    found = layer.legs(asked.job.combine_wire)
    if not found.slow:
        return "fast link"
    return "slow link" if found.slow / cluster.slow >= found.fast / cluster.fast else "fast link"


def _nearest(asked: Asked, model: str) -> Iterator[Residual]:
    on_cpu = asked.cluster.kind == "cpu"
    rows = [row for row in residuals.load() if row.table.startswith("cpu_") == on_cpu]
    for table in dict.fromkeys(row.table for row in rows):
        if table == "flops" and not any(row.table == table and row.model == model for row in rows):
            continue
        yield from residuals.nearest(
            rows,
            table=table,
            cluster=asked.cluster.name,
            dispatcher=asked.dispatcher,
            model=model,
            ranks=asked.job.expert_parallel_size,
            math_=asked.job.math,
        )


def too_large(asked: Asked, needed: Memory) -> ConfigError:
    """What to say of a job that does not fit: what takes the room, and the first change that would help."""
    parts = {
        "weights": needed.weights,
        "gradients": needed.gradients,
        "optimizer": needed.optimizer,
        "gathered weights": needed.gathered,
        "activations": needed.activations,
        "exchange buffers": needed.exchange,
        "logits": needed.logits,
    }
    listed = ", ".join(
        f"{name} {size / 1e9:.3g}" for name, size in parts.items() if size > 0.005 * needed.total
    )
    fitting = (fix for fix, job in _smaller(asked) if memory(job, asked.cluster).fits)
    fix = next(fitting, "take a cluster with more memory, or fewer layers")
    return ConfigError(
        "cluster.memory_gb",
        f"{asked.cluster.memory_bytes / 1e9:g}",
        f"a rank would need {needed.total / 1e9:.4g} GB ({listed})",
        expected=f"at most {needed.available / 1e9:.4g} GB",
        fix=fix,
    )


def _smaller(asked: Asked) -> Iterator[tuple[str, Job]]:
    """Changes that save memory, those that cost least first: on as many GPUs, then on more."""
    yield from _on_as_many(asked.job)
    for times in (2, 4, 8, 16, 32, 64):
        job = replace(asked.job, data_parallel_size=times * asked.job.data_parallel_size)
        gpus = f"cluster.num_gpus={times * asked.cluster.num_gpus}"
        for shared in (times, 1):
            ranks = shared * job.expert_parallel_size
            if asked.cluster.slow_link is None or job.routes.num_experts % ranks:
                continue
            wider = replace(job, expert_parallel_size=ranks)
            more = gpus if shared == 1 else f"{gpus} strategy.expert_parallel_size={ranks}"
            yield more, wider
            yield from ((f"{more} {fix}", smaller) for fix, smaller in _on_as_many(wider))


def _on_as_many(job: Job) -> Iterator[tuple[str, Job]]:
    spread = replace(job, sharding="all", gathers=2)
    small = replace(job, micro_batch_size=1, micro_batches=job.micro_batches * job.micro_batch_size)
    if job.sharding == "none":
        yield "strategy=fully_shard", spread
    if job.micro_batch_size > 1:
        yield "data.micro_batch_size=1", small
    if not job.shape.activation_checkpointing:
        yield "model.activation_checkpointing=true", _recomputing(job)
        if job.sharding == "none":
            yield "strategy=fully_shard model.activation_checkpointing=true", _recomputing(spread)
        if job.micro_batch_size > 1:
            yield "data.micro_batch_size=1 model.activation_checkpointing=true", _recomputing(small)


def _recomputing(job: Job) -> Job:
    return replace(job, shape=replace(job.shape, activation_checkpointing=True))
