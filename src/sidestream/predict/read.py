"""From a composed config to what is predicted. Whatever cannot be laid out is refused here, with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from sidestream.config.availability import Machine, takes_library
from sidestream.config.capabilities import CAPABILITIES
from sidestream.config.compatibility import check, check_strategy
from sidestream.config.construct import construct
from sidestream.config.errors import ConfigError
from sidestream.config.fusion_check import is_mega
from sidestream.config.graph_check import is_step
from sidestream.config.keys import check_keys
from sidestream.config.layout import Layout
from sidestream.config.overlap_check import check_overlap
from sidestream.config.place import CONF
from sidestream.config.predict_check import check_prediction
from sidestream.model.config import shape_from
from sidestream.predict.cluster import Cluster, Math
from sidestream.predict.job import Job, ranks_of_domain
from sidestream.predict.layer import Mover
from sidestream.predict.schedules import Work
from sidestream.predict.traffic import Routes, Wire

if TYPE_CHECKING:
    from sidestream.overlap.base import Schedule

BYTES_OF_TEXT = 256  # vocabulary of a model that takes the data's
MATH: dict[str, Math] = {"32-true": "fp32", "bf16-mixed": "bf16", "bf16-true": "bf16"}
# Rows of an expert are padded to this for 8-bit products (fp8 scales tiles of 16 rows, mxfp8 blocks of 32).
ALIGNMENT = {"fp8": 16, "mxfp8": 32}
GIGA, TERA, MICRO, NANO = 1e9, 1e12, 1e-6, 1e-9
# (weights, gradients, optimizer) where the optimizer's state is spread, as in NVIDIA's recipes for Megatron-Core: bf16
# weights and gradients, fp32 weights and two moments.
SPREAD_STATE = (2, 2, 12)


@dataclass(frozen=True)
class Asked:
    """What a config asks for.

    Attributes:
        dispatcher: Name of the option.
        schedules: For the picture: those that hide something and that the same job may have, shipped or asked for.
    """

    job: Job
    cluster: Cluster
    layout: Layout
    dispatcher: str
    schedules: tuple[Schedule, ...]


def read(cfg: DictConfig, *, name: str) -> Asked:
    """Check a config and take what a prediction needs from it.

    Args:
        cfg: The root config, composed as conf/predict.yaml.
        name: Of the cluster's option.

    Raises:
        ConfigError: naming the key to change.
    """
    check_keys(cfg)
    cluster = cluster_of(cfg.cluster, name=name)
    layout = _layout(cfg, cluster)
    check_prediction(cfg, layout)
    math = _math(cfg, cluster)
    if cluster.num_gpus > cluster.gpus_per_domain and cluster.slow_link is None:
        raise ConfigError(
            "cluster.num_gpus",
            cluster.num_gpus,
            f"cluster={name} joins {cluster.gpus_per_domain} ranks, and no link beyond is known",
            expected=f"at most {cluster.gpus_per_domain}, or cluster.slow_link_gb_per_s",
            fix=f"cluster.num_gpus={cluster.gpus_per_domain}",
        )
    router, predict = cfg.router, cfg.predict
    values: Any = OmegaConf.to_container(cfg.model, resolve=True)
    value_wire: Wire = "fp32" if math == "fp32" else "bf16"
    job = Job(
        shape=shape_from(values, vocab_size=BYTES_OF_TEXT),
        routes=Routes(
            cfg.model.num_experts, router.top_k, router.get("num_groups") or 1, router.get("top_groups") or 1
        ),
        mover=_mover(cfg, cluster, layout),
        seq_length=cfg.data.seq_length,
        micro_batch_size=layout.micro_batch_size,
        micro_batches=layout.accumulation,
        expert_parallel_size=layout.expert_parallel_size,
        data_parallel_size=layout.world_size,
        pipeline_stages=predict.pipeline_stages,
        virtual_stages=predict.virtual_stages,
        math=math,
        dispatch_wire=_wire(cfg, value_wire),
        combine_wire=value_wire,
        skew=predict.skew,
        in_graph=is_step(cfg.graph),
        sharding=sharding(cfg),
        # Once for forward, and once more for backward where a block's weights were freed meanwhile.
        gathers=1 + bool(cfg.strategy.get("reshard_after_forward")) if sharding(cfg) == "all" else 0,
        state_bytes=state_bytes(cfg),
        alignment=_alignment(cfg, math, cluster),
    )
    work = _work(cfg, layout, job)
    return Asked(
        job.with_work(work),
        throttled(cluster, cfg.link),
        layout,
        _option(cfg.dispatcher, "dispatch"),
        tuple(_others(cfg, layout, work)) if cfg.predict.plot else (),
    )


def cluster_of(node: DictConfig, *, name: str) -> Cluster:
    """The machine of a `cluster` option, in SI units."""
    if not node:
        raise ConfigError(
            "cluster", "none", "nothing to predict for", expected="a machine", fix="cluster=gb300_nvl72"
        )

    def scaled(key: str, factor: float) -> float | None:
        return None if node[key] is None else node[key] * factor

    return Cluster(
        name=name,
        kind=node.kind,
        mxfp8=node.mxfp8,
        num_gpus=node.num_gpus,
        gpus_per_domain=node.gpus_per_domain,
        flops=node.bf16_tflops * TERA,
        flops_8bit=scaled("fp8_tflops", TERA),
        flops_32bit=scaled("fp32_tflops", TERA),
        attention_flops=node.attention_tflops * TERA,
        memory_bandwidth=node.memory_tb_per_s * TERA,
        memory_bytes=node.memory_gb * GIGA,
        activation_rate=scaled("activation_gvalues_per_s", GIGA),
        fast_link=node.fast_link_gb_per_s * GIGA,
        slow_link=scaled("slow_link_gb_per_s", GIGA),
        gemm_efficiency=node.gemm_efficiency,
        gemm_efficiency_8bit=node.fp8_gemm_efficiency,
        memory_efficiency=node.memory_efficiency,
        fast_link_efficiency=node.fast_link_efficiency,
        slow_link_efficiency=node.slow_link_efficiency,
        layer_overhead=node.layer_overhead_us * MICRO,
        seconds_per_route=node.route_ns * NANO,
        seconds_per_score=node.score_ns * NANO,
        backward_overhead=node.backward_overhead,
        block_overhead=node.block_overhead_us * MICRO,
        overhead_in_graph=node.overhead_in_graph,
        exchange_latency=node.exchange_latency_us * MICRO,
        wire_on_compute=node.wire_on_compute,
        emulated_latency=scaled("emulated_latency_us", MICRO),
    )


def throttled(cluster: Cluster, link: DictConfig) -> Cluster:
    """The machine with `link=throttled` in the place of its own links: each rank has a link of that rate."""
    if "gbps" not in link:
        return cluster
    if cluster.emulated_latency is None:
        raise ConfigError(
            "link",
            "throttled",
            f"it is emulated on CPU ranks, and cluster={cluster.name} has links of its own",
            expected="native, and another cluster.slow_link_gb_per_s",
            fix="link=native",
        )
    emulated = min(link.gbps * GIGA / 8, cluster.fast)
    return replace(
        cluster,
        fast_link=emulated,
        fast_link_efficiency=1.0,
        exchange_latency=link.latency_us * MICRO + cluster.emulated_latency,
        own_bandwidth=cluster.fast,
        # The calls and wake-ups around an emulated exchange run on the core that computes.
        own_latency=cluster.emulated_latency,
    )


def _layout(cfg: DictConfig, cluster: Cluster) -> Layout:
    if cfg.trainer.devices != "auto":
        raise ConfigError(
            "trainer.devices",
            cfg.trainer.devices,
            "of a prediction, the cluster sets the size",
            expected="auto",
            fix=f"trainer.devices=auto cluster.num_gpus={cfg.trainer.devices}",
        )
    stages = cfg.predict.pipeline_stages
    if cluster.num_gpus % stages:
        raise ConfigError(
            "predict.pipeline_stages",
            stages,
            f"does not divide cluster.num_gpus={cluster.num_gpus}",
            expected="a divisor of it",
            fix="predict.pipeline_stages=1",
        )
    if cfg.predict.virtual_stages > 1 and stages == 1:
        raise ConfigError(
            "predict.virtual_stages",
            cfg.predict.virtual_stages,
            "without a pipeline there are no stages to cut",
            expected="1",
            fix="predict.virtual_stages=1",
        )
    ranks = cluster.num_gpus // stages
    check_strategy(cfg.strategy)
    _check_domains(cfg, cluster, ranks)
    gpus = 0 if cluster.kind == "cpu" else cluster.gpus_per_domain
    return check(
        cfg,
        world_size=ranks,
        local_world_size=min(ranks, cluster.gpus_per_domain),
        device_count=gpus,
        machine=Machine.with_everything(gpus=gpus) if gpus else None,
        predicts=True,
    )


def _check_domains(cfg: DictConfig, cluster: Cluster, ranks: int) -> None:
    """Groups of experts' ranks lie evenly in the domains of the fast link, or take whole ones."""
    size, domain = cfg.strategy.expert_parallel_size, ranks_of_domain(ranks, cluster.gpus_per_domain)
    if size == "auto" or size < 1 or ranks % size or domain % size == 0 or size % domain == 0:
        return
    fits = [n for n in range(1, size) if domain % n == 0 and cfg.model.num_experts % n == 0]
    raise ConfigError(
        "strategy.expert_parallel_size",
        size,
        f"{ranks} ranks lie in domains of {domain}, and some groups would lie across two of them",
        expected=f"a divisor or a multiple of {domain}",
        fix=f"strategy.expert_parallel_size={fits[-1]}",
    )


def _math(cfg: DictConfig, cluster: Cluster) -> Math:
    math = cfg.predict.math if cfg.predict.math != "auto" else MATH[cfg.trainer.precision]
    if math == "mxfp8" and not cluster.mxfp8:
        why = f"cluster={cluster.name} has no products of block-scaled 8-bit values"
        raise ConfigError("predict.math", math, why, expected="fp8 or bf16", fix="predict.math=bf16")
    try:
        cluster.products(math)
    except ValueError as error:
        key = "predict.math" if cfg.predict.math != "auto" else "trainer.precision"
        value = cfg.predict.math if cfg.predict.math != "auto" else cfg.trainer.precision
        raise ConfigError(
            key, value, str(error), expected="a precision it has a rate for", fix="predict.math=bf16"
        ) from error
    return math


def _mover(cfg: DictConfig, cluster: Cluster, layout: Layout) -> Mover:
    if is_mega(cfg.fusion):
        return Mover(
            packing="per_rank",
            packs_in_kernel=True,
            reads_counts=False,
            slots=_mega_slots(cfg, cluster, layout),
        )
    can = CAPABILITIES.get(cfg.dispatcher.get("_target_", ""))
    if can is None or (can.packing is None and can.max_expert_parallel_size != 1):
        raise ConfigError(
            "dispatcher",
            cfg.dispatcher.get("_target_", "?"),
            "nothing is known of how this class moves rows",
            expected="one of the shipped dispatchers",
            fix="dispatcher=alltoall",
        )
    static = cfg.dispatcher.get("capacity_factor") is not None
    library = False
    if can.library is not None and cluster.kind != "cpu":
        machine = Machine.with_everything(gpus=cluster.gpus_per_domain)
        wanted = cfg.dispatcher.get("transport", "auto")
        library = takes_library(wanted, can.library, machine=machine, ranks=layout.expert_parallel_size)
    return Mover(
        packing="per_node" if library else cast(Any, can.packing or "per_route"),
        packs_in_kernel=library,
        reads_counts=not static,
        routes_apart=not library and can.packing is not None,
        slots=_slots(cfg.dispatcher),
    )


def _mega_slots(cfg: DictConfig, cluster: Cluster, layout: Layout) -> float:
    """Without a factor there is room for the worst case; on a CPU untouched memory costs nothing."""
    if cfg.fusion.capacity_factor is not None or cluster.kind == "cpu":
        return cfg.fusion.capacity_factor or 1.0
    ranks, top_k = layout.expert_parallel_size, cfg.router.top_k
    return ranks * min(top_k, cfg.model.num_experts // ranks) / top_k


def _slots(node: DictConfig) -> float:
    return node.get("capacity_factor") or 1.0


def _interleaved(cfg: DictConfig, name: str, layout: Layout) -> float:
    """Of m micro-batches all but one run beside another."""
    if not cfg.predict.interleave or not cfg.overlap.get("enabled", True):
        return 0.0

    def refuse(why: str, expected: str, fix: str = "predict.interleave=false") -> ConfigError:
        return ConfigError("predict.interleave", True, why, expected=expected, fix=fix)

    if name != "none":
        raise refuse(f"overlap={name} is a schedule already", "one of them", "overlap=none")
    if is_mega(cfg.fusion):
        raise refuse("fusion=mega has no transfers of its own", "false")
    if layout.expert_parallel_size == 1:
        raise refuse("on one rank nothing travels", "false, or strategy.expert_parallel_size above 1")
    if layout.accumulation < 2:
        raise refuse("a step of one micro-batch has no other one", "a data.global_batch_size for two or more")
    return 1 - 1 / layout.accumulation


def _work(cfg: DictConfig, layout: Layout, job: Job) -> Work:
    """The schedule in the model's units. That it can be recorded is tried for every kind of unit.

    Raises:
        ConfigError: It cannot.
    """
    from sidestream.overlap.base import completed

    def refuse(why: str, expected: str) -> ConfigError:
        return ConfigError("overlap", cfg.overlap._target_, why, expected=expected, fix="overlap=none")

    try:
        schedule = completed(construct("overlap", cfg.overlap, cfg))
    except TypeError as error:
        said = str(error).partition("\n")[0]
        raise refuse(f"it cannot be built ({said})", "keys that its class takes") from error
    work = Work(
        schedule,
        job.shape,
        sequences=job.micro_batch_size,
        seq_length=job.seq_length,
        top_k=job.routes.top_k,
        fused=is_mega(cfg.fusion),
        interleaved=_interleaved(cfg, schedule.name, layout),
    )
    try:
        for before in {work.reads_before(block) for block in (*job.shape.moe_blocks, job.shape.num_layers)}:
            work.orders(before=before)
    except ValueError as error:
        raise refuse(
            f"its order of work cannot be recorded ({error})",
            "a schedule that runs on tensors of torch's meta device and waits for what it starts",
        ) from error
    return work


def _others(cfg: DictConfig, layout: Layout, work: Work) -> Iterator[Schedule]:
    """The shipped schedules that fit, and what is asked for in the place of its own option."""
    asked = cfg.overlap
    options: list[Any] = [OmegaConf.load(path) for path in sorted((CONF / "overlap").glob("*.yaml"))]
    if asked._target_ not in [option._target_ for option in options]:
        yield work.schedule
    other = cfg.copy()
    for option in options:
        del option["defaults"]
        if option._target_ == asked._target_:
            option = asked.copy()
        with read_write(option), open_dict(option):
            option.enabled = True
            if "delay_wgrad" in option:
                option.delay_wgrad = bool(asked.get("delay_wgrad"))
        with read_write(other), open_dict(other):
            other.overlap = option
        try:
            check_overlap(other, layout)
        except ConfigError:
            continue
        schedule = construct("overlap", option, other)
        if schedule.name != "none":
            yield schedule


def _option(node: DictConfig, folder: str) -> str:
    """Name of the module that a shipped class lives in: that of its option."""
    return str(node.get("_target_", "")).removeprefix(f"sidestream.{folder}.").partition(".")[0]


def _wire(cfg: DictConfig, values: Wire) -> Wire:
    if cfg.predict.dispatch_wire != "auto":
        return cfg.predict.dispatch_wire
    return "mxfp8" if cfg.dispatcher.get("wire_dtype") == "mxfp8" else values


def sharding(cfg: DictConfig) -> str:
    if "fully_shard" in str(cfg.strategy.get("_target_", "")):
        return "all"
    return "optimizer" if cfg.predict.shard_optimizer else "none"


# Tensors of a parameter's size that a class of torch.optim keeps; options add some.
_MOMENTS = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta"), 2),
    **dict.fromkeys(("Adagrad", "RMSprop", "Muon"), 1),
    "SGD": 0,
}


def state_bytes(cfg: DictConfig, *, moments_of_others: int = 2) -> tuple[int, int, int]:
    """Returns the bytes per parameter of weight, gradient and optimizer.

    Args:
        moments_of_others: Of an optimizer that is not known here, such as a user's own.
    """
    if cfg.predict.shard_optimizer:
        return SPREAD_STATE
    size = 2 if cfg.trainer.precision == "bf16-true" else 4
    target = str(cfg.optimizer.get("_target_", ""))
    moments = _MOMENTS.get(target.removeprefix("torch.optim."), moments_of_others)
    if target in ("torch.optim.SGD", "torch.optim.RMSprop"):
        moments += bool(cfg.optimizer.get("momentum"))
    return size, size, moments * size


def _alignment(cfg: DictConfig, math: Math, cluster: Cluster) -> int:
    wanted = cfg.fusion.get("alignment", "auto")
    if wanted == "auto":  # as `fusion.base.resolve_alignment`, which needs torch
        wanted = 16 if math == "bf16" and cluster.kind == "cpu" else ALIGNMENT.get(math, 1)
    return max(wanted, cfg.dispatcher.get("alignment", 1))
