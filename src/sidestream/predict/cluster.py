"""What the predictor knows of a machine. Values live in conf/cluster/, with their sources.

Every number is in SI units (bytes, FLOP, seconds, no prefixes), and its dimension is stated beside it, so that a test
can change the units and see that every time that comes out changes with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

Math = Literal["fp32", "bf16", "fp8", "mxfp8"]


def measured_in(*, byte: int = 0, flop: int = 0, second: int = 0) -> Any:
    """A field with a dimension: the exponents of its units."""
    return field(metadata={"dimension": {"byte": byte, "flop": flop, "second": second}})


def number() -> Any:
    """A field without a dimension."""
    return measured_in()


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One kind of GPU, or CPU core, and the links between them.

    Attributes:
        name: Of the option.
        kind: `gpu` or `cpu`. On a CPU a rank's core also does the copying of its transfers.
        mxfp8: There are products of block-scaled 8-bit values.
        num_gpus: Of the whole job; on a CPU the ranks.
        gpus_per_domain: Of them, how many the fast link joins: an NVLink domain, the ranks of a host.
        flops, flops_8bit, flops_32bit: Peak, dense, of matrix products in 16, 8 and 32 bits; None: no such unit, or not
            known. On a CPU what a large product reaches.
        attention_flops: What score and value products reach.
        memory_bandwidth, memory_bytes: Peak, and size, of one GPU.
        activation_rate: Values that the pass between the experts' products makes per second; None: as fast as memory.
        fast_link, slow_link: Peak per direction of one GPU inside its domain, and between domains.
        gemm_efficiency, gemm_efficiency_8bit: Of products with as many rows as a rank has in training.
        memory_efficiency: Of passes over rows.
        fast_link_efficiency, slow_link_efficiency: Of exchanges.
        layer_overhead: Of the forward pass of a MoE layer beside products, passes and wire: launches, small operators.
        seconds_per_route, seconds_per_score: Of the router and of sorting, per token and route, per token and expert.
        backward_overhead: Backward has this many times the three above.
        block_overhead: Of attention, or a dense feed-forward, as `layer_overhead`.
        overhead_in_graph: Share of the overheads that a step graph leaves.
        exchange_latency: Of one exchange.
        wire_on_compute: Seconds of compute that a transfer costs, per second of it, when both run at once: the share of
            the multiprocessors that its kernels take; on a CPU 1 of the time in which the core copies.
        emulated_latency: Of one exchange over `link=throttled`, beside the link's own; None: there is no such link.
        own_bandwidth, own_latency: Of the machine's own transport, where a link is emulated over it; else None.
    """

    name: str
    kind: str
    mxfp8: bool
    num_gpus: int
    gpus_per_domain: int
    flops: float = measured_in(flop=1, second=-1)
    flops_8bit: float | None = measured_in(flop=1, second=-1)
    flops_32bit: float | None = measured_in(flop=1, second=-1)
    attention_flops: float = measured_in(flop=1, second=-1)
    memory_bandwidth: float = measured_in(byte=1, second=-1)
    memory_bytes: float = measured_in(byte=1)
    activation_rate: float | None = measured_in(second=-1)
    fast_link: float = measured_in(byte=1, second=-1)
    slow_link: float | None = measured_in(byte=1, second=-1)
    gemm_efficiency: float = number()
    gemm_efficiency_8bit: float = number()
    memory_efficiency: float = number()
    fast_link_efficiency: float = number()
    slow_link_efficiency: float = number()
    layer_overhead: float = measured_in(second=1)
    seconds_per_route: float = measured_in(second=1)
    seconds_per_score: float = measured_in(second=1)
    backward_overhead: float = number()
    block_overhead: float = measured_in(second=1)
    overhead_in_graph: float = number()
    exchange_latency: float = measured_in(second=1)
    wire_on_compute: float = number()
    emulated_latency: float | None = measured_in(second=1)
    own_bandwidth: float | None = field(default=None, metadata={"dimension": {"byte": 1, "second": -1}})
    own_latency: float | None = field(default=None, metadata={"dimension": {"second": 1}})

    def with_own_links(self) -> Cluster:
        """Without the emulated link."""
        assert self.own_bandwidth is not None and self.own_latency is not None
        return replace(
            self,
            fast_link=self.own_bandwidth,
            exchange_latency=self.own_latency,
            own_bandwidth=None,
            own_latency=None,
        )

    @property
    def fast(self) -> float:
        """Bytes per second and direction of an exchange inside a domain."""
        return self.fast_link * self.fast_link_efficiency

    @property
    def slow(self) -> float:
        """The same between domains.

        Raises:
            ValueError: This machine has one domain.
        """
        if self.slow_link is None:
            raise ValueError(f"cluster={self.name}: nothing joins its domains of {self.gpus_per_domain}")
        return self.slow_link * self.slow_link_efficiency

    @property
    def memory(self) -> float:
        """Bytes per second of a pass over rows."""
        return self.memory_bandwidth * self.memory_efficiency

    def products(self, math: Math) -> float:
        """FLOP per second of matrix products.

        Raises:
            ValueError: Not known of this machine.
        """
        peak = {"fp32": self.flops_32bit, "bf16": self.flops}.get(math, self.flops_8bit)
        if peak is None:
            raise ValueError(f"cluster={self.name}: the rate of its {math} products is not known")
        return peak * (self.gemm_efficiency if math in ("fp32", "bf16") else self.gemm_efficiency_8bit)
