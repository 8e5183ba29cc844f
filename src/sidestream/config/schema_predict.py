"""Keys of predict.py and of scripts/measure_overlap.py."""

from dataclasses import dataclass, field

from sidestream.config.schema_key import Component, key, one_of

# ruff: noqa: RUF009 - `key()` and `one_of()` are dataclasses.field() with our limits in it


@dataclass
class NoCluster:
    """Nothing is predicted."""


@dataclass
class Cluster(NoCluster):
    """A machine that predict.py knows: conf/cluster/. Units are in the names; links are per direction."""

    kind: str = one_of(("gpu", "cpu"), "on a CPU the core that computes copies too")
    mxfp8: bool = key("whether matrix products take block-scaled 8-bit values")
    num_gpus: int = key("GPUs of the whole job; ranks on a CPU", low=1)
    gpus_per_domain: int = key("GPUs that the fast link joins", low=1)
    bf16_tflops: float = key("dense peak of one GPU, TFLOP/s", above=0.0)
    fp8_tflops: float | None = key("dense peak, also of mxfp8; null: no such unit", above=0.0)
    fp32_tflops: float | None = key("dense peak; null: not known", above=0.0)
    attention_tflops: float = key("what attention's score and value products reach, TFLOP/s", above=0.0)
    memory_tb_per_s: float = key("peak of one GPU's memory, TB/s", above=0.0)
    memory_gb: float = key("memory of one GPU, GB", above=0.0)
    activation_gvalues_per_s: float | None = key(
        "10^9 values per second of the pass between the experts' products; null: as fast as memory", above=0.0
    )
    fast_link_gb_per_s: float = key("inside a domain, GB/s per GPU and direction", above=0.0)
    slow_link_gb_per_s: float | None = key(
        "between domains, GB/s per GPU and direction; null: there is one domain", above=0.0
    )
    gemm_efficiency: float = key(
        "share of the peak that matrix products in bf16 and fp32 reach", above=0.0, high=1.0
    )
    fp8_gemm_efficiency: float = key("the same in fp8 and mxfp8", above=0.0, high=1.0)
    memory_efficiency: float = key(
        "share of the memory's peak that passes over rows reach", above=0.0, high=1.0
    )
    fast_link_efficiency: float = key("share of the fast link that exchanges reach", above=0.0, high=1.0)
    slow_link_efficiency: float = key("share of the slow link that exchanges reach", above=0.0, high=1.0)
    layer_overhead_us: float = key(
        "microseconds of a MoE layer's forward pass for launches and small operators", low=0.0
    )
    route_ns: float = key("nanoseconds of routing, per token and chosen expert", low=0.0)
    score_ns: float = key("nanoseconds of routing, per token and expert", low=0.0)
    backward_overhead: float = key(
        "how many times `layer_overhead_us`, `route_ns` and `score_ns` backward has", low=0.0
    )
    block_overhead_us: float = key(
        "microseconds of an attention or a feed-forward for launches and small operators", low=0.0
    )
    overhead_in_graph: float = key("share of the overheads that `graph=step` leaves", low=0.0, high=1.0)
    exchange_latency_us: float = key("microseconds of one exchange, whatever its size", low=0.0)
    emulated_latency_us: float | None = key(
        "the same for one over `link=throttled`, beside the link's own", low=0.0
    )
    wire_on_compute: float = key(
        "seconds of compute that one second of hidden transfer costs", low=0.0, high=1.0
    )


@dataclass
class Published:
    """What was measured of a recipe."""

    tokens_per_second_per_gpu: float = key("measured throughput, tokens/s", above=0.0)
    tflops_per_gpu: float | None = key("measured TFLOP/s; null: not published", default=None)
    source: str = key("where the figures are published")
    why: str = key("why this dispatcher was chosen")


@dataclass
class Predict:
    """What predict.py takes beside the other groups."""

    math: str = one_of(
        ("auto", "fp32", "bf16", "fp8", "mxfp8"), "type of matrix products; `auto`: as `trainer.precision`"
    )
    dispatch_wire: str = one_of(
        ("auto", "bf16", "fp8", "mxfp8"), "type of the rows in a dispatch; `auto`: as `dispatcher.wire_dtype`"
    )
    skew: float = key("rows of the busiest rank over the mean", low=1.0)
    pipeline_stages: int = key("stages of a pipeline of ranks; training has none", low=1)
    virtual_stages: int = key("of each rank of the pipeline", low=1)
    shard_optimizer: bool = key("spread the optimizer's state over the data-parallel ranks; not in training")
    interleave: bool = key(
        "one micro-batch's rows travel while another computes (Megatron-Core); not in training"
    )
    plot: bool = key("draw the picture")
    published: Published | None = key("of a recipe: what was measured, a map of the keys below", default=None)


@dataclass
class Sleeps:
    """Milliseconds of a part in each pass, instead of what it took."""

    attention: float | None = key("milliseconds; null: what it took", low=0.0)
    attention_before: float | None = key(
        "the same of the dense block in front, where the unit runs it", low=0.0
    )
    feed_forward: float | None = key("the same", low=0.0)
    experts: float | None = key("the same", low=0.0)
    weight_gradients: float | None = key("the same, with `overlap.delay_wgrad=true`", low=0.0)
    shared: float | None = key("the same, of the shared expert", low=0.0)
    shared_up: float | None = key(
        "the same, with `overlap=shared_expert`, which computes the shared expert in two halves", low=0.0
    )
    shared_down: float | None = key("the same, of its second half", low=0.0)


@dataclass
class Measure(Component):
    """Of scripts/measure_overlap.py; `train.py` has no such group."""

    scope: str = one_of(
        ("unit", "step"), "forward and backward of one MoE unit, or the attempt of a whole training step"
    )
    layer: int = key("which MoE layer's unit", low=0)
    compute: str = one_of(
        ("real", "sleep"),
        "`sleep`: attention, feed-forward, experts and shared expert sleep as long as they took",
    )
    sleep_ms: Sleeps = field(default_factory=Sleeps)
    comm_share: float | None = key(
        "the throttled link gets the rate at which communication is this share of the serial time",
        above=0.0,
        high=0.95,
    )
    rounds: int = key("each with compute alone, communication alone, serial, overlapped", low=1)
    warmup: int = key("rounds before them that do not count", low=0)
    trace: bool = key("also write a Chrome trace per rank (torch.profiler)")
    out: str | None = key("folder of overlap.json, .png and .svg; null: the run folder")
