"""Shapes, types and limits of every config group. Values live in conf/.

Stored under `schema/<group>/<name>`, which keeps them out of the lists of options a user sees. The fields of `Root`
that are `Any` also take a user's own YAML, which has no schema here.
"""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

# ruff: noqa: RUF009 - `key()` and `one_of()` are dataclasses.field() with our limits in it


def key(
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    length: int | None = None,
    auto: bool = False,
    real: bool = False,
) -> Any:
    """A key whose value comes from YAML, with the limits that `keys.check_keys` enforces.

    Limits of a list are those of its items, and `length` how many there are. Without `high` a number still has
    one: `keys.LARGEST_INTEGER`, `keys.LARGEST_NUMBER`. `auto` allows `auto` beside an integer, or with `real`
    beside any number.
    """
    limits = {"low": low, "above": above, "high": high, "below": below, "length": length}
    limits |= {"auto": auto, "real": real}
    return field(default=MISSING, metadata=limits)


def one_of(*choices: object) -> Any:
    """A key that takes one of a few values."""
    return field(default=MISSING, metadata={"choices": choices})


@dataclass
class LatentAttention:
    q_lora_rank: int | None = key(low=1)
    kv_lora_rank: int = key(low=1)
    qk_nope_head_dim: int = key(low=1)
    qk_rope_head_dim: int = key(low=2)
    v_head_dim: int = key(low=1)


@dataclass
class Model:
    vocab_size: int | None = key(low=1, high=2**24)
    num_layers: int = key(low=1, high=10_000)  # beyond, even counting the blocks takes minutes
    hidden_size: int = key(low=1)
    num_heads: int = key(low=1, high=2**16)
    num_kv_heads: int = key(low=1)
    head_dim: int | None = key(low=2)
    qk_norm: str = one_of("none", "head", "full")
    mla: LatentAttention | None = key()
    sliding_window: int | None = key(low=1)
    full_attention_layers: Any = key()  # as moe_layers
    ffn_hidden_size: int = key(low=1)
    moe_layers: Any = key()  # n: every n-th block; or a list of block indices, [] is a dense model
    first_dense_layers: int = key(low=0)
    num_experts: int = key(low=1)
    expert_hidden_size: int = key(low=1)
    num_shared_experts: int = key(low=0)
    shared_expert_hidden_size: int | None = key(low=1)
    shared_expert_gate: bool = key()
    tie_embeddings: bool = key()
    dropout: float = key(low=0.0, high=1.0)
    activation_checkpointing: bool = key()
    rope_theta: float = key(above=0.0)
    norm_eps: float = key(above=0.0)
    init_std: float = key(low=0.0)
    num_mtp_layers: int = key(low=0)
    trainable: bool = key()


@dataclass
class Component:
    _target_: str = MISSING


@dataclass
class TopKRouter(Component):
    top_k: int = key()  # its limit depends on the model: compatibility.py
    normalize: bool | str = one_of("auto", True, False)
    score_order: str = one_of("before_top_k", "after_top_k")
    scaling_factor: float = key(above=0.0)
    num_groups: int | None = key(low=1)
    top_groups: int | None = key(low=1)
    jitter: float = key(low=0.0, high=1.0)
    expert_capacity_factor: float | None = key(above=0.0, high=1000.0)
    drop_policy: str = one_of("probs", "position")
    pad_to_capacity: bool = key()
    force_balance: bool = key()


@dataclass
class Balance(Component):
    z_loss_coefficient: float = key(low=0.0)


@dataclass
class AuxLoss(Balance):
    coefficient: float = key(low=0.0)
    scope: str = one_of("sequence", "micro_batch", "global")


@dataclass
class ExpertBias(Balance):
    update_rate: float = key(low=0.0)


@dataclass
class QuantileBalance(Balance):
    ema: float = key(low=0.0, high=0.999)


@dataclass
class Dispatcher(Component):
    capacity_factor: float | None = key(above=0.0, high=1000.0)
    alignment: int = key(low=1, high=2**16)
    on_overflow: str = one_of("replay", "drop", "error")


@dataclass
class LibraryDispatcher(Dispatcher):
    transport: str = one_of("auto", "library", "torch")
    wire_dtype: str = one_of("model", "mxfp8")


@dataclass
class Experts(Component):
    alignment: int | str = key(low=1, high=2**16, auto=True)


@dataclass
class MegaExperts(Experts):
    library: str = one_of("auto", "windows", "triton", "mok")
    capacity_factor: float | None = key(above=0.0, high=1000.0)
    on_overflow: str = one_of("replay", "drop", "error")


@dataclass
class NoOverlap(Component):
    enabled: bool = True


@dataclass
class Overlap(NoOverlap):
    delay_wgrad: bool = key()


@dataclass
class ChunkedOverlap(Overlap):
    num_chunks: int = key(low=2)


@dataclass
class ShortcutOverlap(Overlap):
    tap: str = one_of("auto", "pos1", "pos2", "pos3")
    mix: str = one_of("add", "cg1", "cg2")
    tap_norm: bool = key()
    post_norm: bool = key()
    double_gating: bool = key()
    slot: int | str = key(low=0, auto=True)


@dataclass
class Graph(Component):
    lint: bool = False


@dataclass
class StepGraph(Graph):
    backend: str = one_of("auto", "cuda", "tape")
    warmup_steps: int = key(low=2)
    include_optimizer: bool = key()


@dataclass
class ThrottledLink(Component):
    gbps: float = key(above=0.0, high=1e6)
    latency_us: float = key(low=0.0, high=1e8)


@dataclass
class Strategy(Component):
    expert_parallel_size: int | str = key(auto=True)  # its limit depends on the world: compatibility.py
    timeout_seconds: int = key(low=1, high=1_000_000)


@dataclass
class Replicate(Strategy):
    bucket_mb: float = key(above=0.0, high=1e6)


@dataclass
class FullyShard(Strategy):
    reshard_after_forward: bool = key()


@dataclass
class AdamW(Component):
    lr: float = key(low=0.0)
    betas: list[float] = key(low=0.0, below=1.0, length=2)
    eps: float = key(above=0.0, high=1.0)
    weight_decay: float = key(low=0.0)
    fused: bool = key()


@dataclass
class SGD(Component):
    lr: float = key(low=0.0)
    momentum: float = key(low=0.0, below=1.0)
    weight_decay: float = key(low=0.0)


@dataclass
class Constant(Component):
    warmup_steps: int | str = key(low=0, auto=True)


@dataclass
class Cosine(Constant):
    min_ratio: float = key(low=0.0, high=1.0)


@dataclass
class WSD(Cosine):
    decay_fraction: float = key(low=0.0, high=1.0)


@dataclass
class PythonSource(Component):
    cache_dir: str = key()
    val_fraction: float = key(above=0.0, high=0.5)
    packing: str = one_of("concat", "documents")
    seq_length: int = key(low=1)
    global_batch_size: int = key(low=1)
    micro_batch_size: int | str = key(low=1, auto=True)
    shuffle: bool = key()


@dataclass
class Documents(PythonSource):
    tokenizer: str = one_of("bytes", "bpe")
    vocab_size: int | str = key(auto=True)  # its limit depends on the tokenizer: data_files.py


@dataclass
class TextFiles(Documents):
    files: list[str] = key()
    val_files: list[str] = key()
    separator: str | None = key()
    encoding: str = key()


@dataclass
class HuggingFace(Documents):
    dataset: str = key()
    config_name: str | None = key()
    revision: str | None = key()
    data_files: list[str] | None = key()
    split: str = key()
    val_split: str | None = key()
    text_column: str = key()
    streaming: bool = key()
    max_documents: int | None = key(low=1)


@dataclass
class TokenFiles(PythonSource):
    train_file: str = key()
    val_file: str | None = key()
    dtype: str | None = one_of(None, "uint8", "uint16", "uint32", "int32", "int64")
    vocab_size: int | str = key(low=1, auto=True)
    eos_token: int | None = key(low=0)
    tokenizer: str | None = key()


@dataclass
class Trainer:
    accelerator: str = one_of("auto", "cpu", "gpu")
    devices: int | str = key(low=1, high=1024, auto=True)
    num_nodes: int = key(low=1)
    max_steps: int = key(low=1)
    precision: str = one_of("32-true", "bf16-mixed", "bf16-true")
    gradient_clip_val: float | None = key(above=0.0)
    log_every_n_steps: int = key(low=1)
    val_check_interval: int = key(low=1)
    limit_val_batches: int = key(low=0)
    threads_per_rank: int | str = key(low=1, high=4096, auto=True)
    pin_cpu: bool = key()
    peak_tflops: Any = key(above=0.0, auto=True, real=True)


@dataclass
class Progress:
    enabled: bool = key()


@dataclass
class Checkpoint:
    every_n_steps: int = key(low=1)
    keep_last: int = key(low=1)


@dataclass
class OverlapReport:
    every_n_steps: Any = key(low=1, auto=True)  # or null


@dataclass
class Callbacks:
    progress: Progress = field(default_factory=Progress)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    overlap_report: OverlapReport = field(default_factory=OverlapReport)


@dataclass
class Logger:
    """Where metrics are mirrored beside metrics.jsonl. Without a `_target_`: nowhere."""


@dataclass
class CSVLogger(Logger):
    _target_: str = MISSING


@dataclass
class TensorBoardLogger(Logger):
    _target_: str = MISSING


@dataclass
class WandbLogger(Logger):
    _target_: str = MISSING
    project: str = key()
    group: str | None = key()
    tags: list[str] = key()
    offline: bool | str = one_of("auto", True, False)


@dataclass
class Paths:
    log_dir: str = key()
    cache_dir: str = key()


@dataclass
class NoCluster:
    """Nothing is predicted."""


@dataclass
class Cluster(NoCluster):
    """A machine that predict.py knows: conf/cluster/. Units are in the names; links are per direction."""

    kind: str = one_of("gpu", "cpu")
    mxfp8: bool = key()
    num_gpus: int = key(low=1)
    gpus_per_domain: int = key(low=1)
    bf16_tflops: float = key(above=0.0)
    fp8_tflops: float | None = key(above=0.0)
    fp32_tflops: float | None = key(above=0.0)
    attention_tflops: float = key(above=0.0)
    memory_tb_per_s: float = key(above=0.0)
    memory_gb: float = key(above=0.0)
    activation_gvalues_per_s: float | None = key(above=0.0)
    fast_link_gb_per_s: float = key(above=0.0)
    slow_link_gb_per_s: float | None = key(above=0.0)
    gemm_efficiency: float = key(above=0.0, high=1.0)
    fp8_gemm_efficiency: float = key(above=0.0, high=1.0)
    memory_efficiency: float = key(above=0.0, high=1.0)
    fast_link_efficiency: float = key(above=0.0, high=1.0)
    slow_link_efficiency: float = key(above=0.0, high=1.0)
    layer_overhead_us: float = key(low=0.0)
    route_ns: float = key(low=0.0)
    score_ns: float = key(low=0.0)
    backward_overhead: float = key(low=0.0)
    block_overhead_us: float = key(low=0.0)
    overhead_in_graph: float = key(low=0.0, high=1.0)
    exchange_latency_us: float = key(low=0.0)
    emulated_latency_us: float | None = key(low=0.0)
    wire_on_compute: float = key(low=0.0, high=1.0)


@dataclass
class Published:
    """What was measured of a recipe."""

    tokens_per_second_per_gpu: float = key(above=0.0)
    tflops_per_gpu: float | None = None
    source: str = key()
    why: str = key()  # this dispatcher


@dataclass
class Predict:
    math: str = one_of("auto", "fp32", "bf16", "fp8", "mxfp8")
    dispatch_wire: str = one_of("auto", "bf16", "fp8", "mxfp8")
    skew: float = key(low=1.0)
    pipeline_stages: int = key(low=1)
    virtual_stages: int = key(low=1)
    shard_optimizer: bool = key()
    interleave: bool = key()
    plot: bool = key()
    published: Published | None = None


@dataclass
class Sleeps:
    attention: float | None = key(low=0.0)
    attention_before: float | None = key(low=0.0)
    feed_forward: float | None = key(low=0.0)
    experts: float | None = key(low=0.0)
    weight_gradients: float | None = key(low=0.0)
    shared: float | None = key(low=0.0)
    shared_up: float | None = key(low=0.0)
    shared_down: float | None = key(low=0.0)


@dataclass
class Measure(Component):
    """Of scripts/measure_overlap.py; `train.py` has no such group."""

    scope: str = one_of("unit", "step")
    layer: int = key(low=0)
    compute: str = one_of("real", "sleep")
    sleep_ms: Sleeps = field(default_factory=Sleeps)
    comm_share: float | None = key(above=0.0, high=0.95)
    rounds: int = key(low=1)
    warmup: int = key(low=0)
    trace: bool = key()
    out: str | None = key()


@dataclass
class Root:
    """The whole config. Groups whose options users may write outside the repository are `Any`."""

    name: str = key()
    seed: int = key(low=0, high=2**63 - 1)
    debug: bool = False
    resume: str | None = None
    initial_weights: str | None = None
    trusted_targets: list[str] = field(default_factory=list)
    model: Model = field(default_factory=Model)
    router: Any = MISSING
    balance: Any = MISSING
    dispatcher: Any = MISSING
    fusion: Any = MISSING
    overlap: Any = MISSING
    graph: Any = MISSING
    link: Any = MISSING
    strategy: Any = MISSING
    optimizer: Any = MISSING
    scheduler: Any = MISSING
    data: Any = MISSING
    trainer: Trainer = field(default_factory=Trainer)
    callbacks: Callbacks = field(default_factory=Callbacks)
    logger: Logger = field(default_factory=Logger)  # stays for `logger=null`
    paths: Paths = field(default_factory=Paths)
    cluster: Any = None
    predict: Predict = field(default_factory=Predict)
    trainable: bool = True


SCHEMAS: dict[str, dict[str, type]] = {
    "model": {"transformer": Model},
    "router": {"softmax": TopKRouter},
    "balance": {"aux_loss": AuxLoss, "bias": ExpertBias, "quantile": QuantileBalance, "none": Balance},
    "dispatcher": {
        "none": Component,
        "local": Component,
        "alltoall": Dispatcher,
        "allgather": Dispatcher,
        "nccl_ep": LibraryDispatcher,
        "deep_ep": LibraryDispatcher,
        "hybrid_ep": LibraryDispatcher,
    },
    "fusion": {"loop": Experts, "grouped": Experts, "mega": MegaExperts},
    "overlap": {
        "none": NoOverlap,
        "shared_expert": Overlap,
        "shortcut": ShortcutOverlap,
        "chunked": ChunkedOverlap,
        "two_batch": Overlap,
    },
    "graph": {"none": Graph, "step": StepGraph},
    "link": {"native": Component, "throttled": ThrottledLink},
    "strategy": {"replicate": Replicate, "fully_shard": FullyShard},
    "optimizer": {"adamw": AdamW, "sgd": SGD},
    "scheduler": {"wsd": WSD, "cosine": Cosine, "constant": Constant},
    "data": {
        "python_source": PythonSource,
        "text": TextFiles,
        "tokens": TokenFiles,
        "huggingface": HuggingFace,
    },
    "trainer": {"default": Trainer},
    "callbacks": {"default": Callbacks},
    "logger": {"none": Logger, "csv": CSVLogger, "tensorboard": TensorBoardLogger, "wandb": WandbLogger},
    "paths": {"default": Paths},
    "measure": {"overlap": Measure},
    "cluster": {"none": NoCluster, "machine": Cluster},
    "predict": {"default": Predict},
}


def register() -> None:
    """Makes the schemas known to Hydra. May be called twice."""
    store = ConfigStore.instance()
    store.store(group="schema", name="root", node=Root)
    for group, schemas in SCHEMAS.items():
        for name, schema in schemas.items():
            store.store(group=f"schema/{group}", name=name, node=schema)


def known_keys() -> list[str]:
    """Returns every key of every shipped option, dotted, without duplicates."""
    keys = dict.fromkeys(name for name in Root.__dataclass_fields__ if name not in SCHEMAS)
    for group, schemas in SCHEMAS.items():
        for schema in schemas.values():
            keys.update(dict.fromkeys(_dotted(group, schema)))
    return list(keys)


def options_with(key: str) -> list[str]:
    """Returns the options of a group that have a key; nothing of a key that none has."""
    group = key.partition(".")[0]
    return [name for name, schema in SCHEMAS.get(group, {}).items() if key in _dotted(group, schema)]


def optional_parts() -> list[str]:
    """Returns the keys that take null or a group of keys."""
    return [
        f"{group}.{item.name}"
        for group, schemas in SCHEMAS.items()
        for schema in schemas.values()
        for item in fields(cast(Any, schema))
        if any(map(is_dataclass, getattr(item.type, "__args__", ())))
    ]


def _dotted(prefix: str, schema: Any) -> list[str]:
    keys = []
    for name, item in schema.__dataclass_fields__.items():
        inner = getattr(item.type, "__dataclass_fields__", None)
        keys += _dotted(f"{prefix}.{name}", item.type) if inner else [f"{prefix}.{name}"]
    return [key for key in keys if not key.endswith("_target_")]
