"""Seconds of the parts of one MoE layer on one rank, forward and backward.

    route     scores, top-k, sorting; counts travel
    dispatch  rows are packed, travel, and are put into the order of the experts
    experts   products, and the pass between them
    combine   the rows of a token are summed where its experts are, travel, and are added up

Backward is the same the other way round, with twice the products. The bytes of a pass over rows are those that it reads
and writes. Which constants are read off published timings, and how far off the result is: docs/predictor.md.

Legend: T tokens of a rank, K routes per token, a = T K pairs of a rank, N rows that travel, D hidden, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sidestream.predict.cluster import Cluster, Math
from sidestream.predict.kernels import VALUE_BYTES, activation_pass, grouped_product
from sidestream.predict.traffic import Legs, Packing, Routes, Wire, destinations, legs, row_bytes, rows_sent

ROUTE_BYTES = (
    5,
    4,
)  # of a row and route, where routes travel apart: local id and weight, gradient of the weight
ACTIVATION_BACKWARD = 3  # passes of the activation's backward, in those of its forward
QUANTISING = 3  # reads and writes around 8-bit products, per value of their operands and bytes of 16 bits


@dataclass(frozen=True, kw_only=True)
class Mover:
    """How a dispatcher moves rows.

    Attributes:
        packing: What travels, see `traffic.legs`.
        packs_in_kernel: The transfer itself gathers what it sends and adds up what comes back (the libraries); else
            those are passes over memory.
        reads_counts: The host waits for the counts of rows before rows travel.
        routes_apart: Ids and weights travel in an exchange of their own, in front of the rows.
        slots: Of receive buffers, in multiples of the mean load; 1: exact sizes.
    """

    packing: Packing
    packs_in_kernel: bool
    reads_counts: bool
    routes_apart: bool = False
    slots: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One MoE layer of one rank.

    Attributes:
        tokens, hidden, width: T, D, F.
        routes: How tokens choose.
        ranks: Expert-parallel ranks.
        per_domain: Of them, those that the fast link joins.
        gated: Experts have gate and up projection (SwiGLU), three matrices; otherwise two.
        math: Of the products.
        dispatch_wire: What travels in dispatch, and in the gradient of combine.
        combine_wire: What travels in combine, and in the gradient of dispatch.
        alignment: Rows of each expert are padded to a multiple.
        skew: Rows of the busiest rank over the mean.
        in_graph: The step is replayed from a graph.
    """

    tokens: int
    hidden: int
    width: int
    routes: Routes
    ranks: int
    per_domain: int
    mover: Mover
    math: Math = "bf16"
    dispatch_wire: Wire = "bf16"
    combine_wire: Wire = "bf16"
    gated: bool = True
    alignment: int = 1
    skew: float = 1.0
    in_graph: bool = False

    @property
    def pairs(self) -> float:
        """a on the busiest rank."""
        return self.tokens * self.routes.top_k * self.skew

    @property
    def local_experts(self) -> float:
        return self.routes.num_experts / self.ranks

    @property
    def value_bytes(self) -> int:
        return VALUE_BYTES[self.math]

    @property
    def weights(self) -> float:
        """Parameters of the local experts."""
        return self.local_experts * (3 if self.gated else 2) * self.hidden * self.width

    @property
    def rows(self) -> float:
        """N on the busiest rank."""
        sent = rows_sent(self.mover.packing, self.routes, tokens=self.tokens, ranks=self.ranks)
        return sent * self._busier

    @property
    def _busier(self) -> float:
        """Rows for the busiest rank over the mean; deduplicated, they are at most all tokens of all ranks."""
        if self.mover.packing == "to_all":
            return 1.0
        if self.mover.packing == "per_route":
            return self.skew
        return min(self.skew, self.ranks / destinations(self.routes, self.ranks))

    def legs(self, wire: Wire) -> Legs:
        """Bytes of one exchange of the busiest rank."""
        row = row_bytes(self.hidden, wire)
        found = legs(
            self.mover.packing,
            self.routes,
            tokens=self.tokens,
            ranks=self.ranks,
            per_domain=self.per_domain,
            row=row,
        )
        return found.times(self._busier)


@dataclass(frozen=True)
class Seconds:
    """Seconds of the parts of one pass.

    `pack` to `add` are the work around the two transfers, in the order of the forward pass.

    Attributes:
        counts: Forward: the exchange of row counts, which nothing can hide.
        late: Of `experts`, backward: the weight gradients.
        fixed: Of `dispatch` and of `combine`, what they take however little travels.
    """

    route: float
    counts: float
    pack: float
    dispatch: float
    unpack: float
    experts: float
    late: float
    gather: float
    combine: float
    add: float
    fixed: tuple[float, float]

    @property
    def total(self) -> float:
        """One after another."""
        work = self.route + self.pack + self.unpack + self.experts + self.gather + self.add
        return work + self.counts + self.dispatch + self.combine


def wire_seconds(found: Legs, cluster: Cluster, *, peers: int) -> float:
    """Seconds of one exchange: both links at once, the slower one decides."""
    if peers < 2:
        return 0.0
    slow = found.slow / cluster.slow if found.slow else 0.0
    return cluster.exchange_latency + max(found.fast / cluster.fast, slow)


def _routes_seconds(layer: Layer, cluster: Cluster, size: int) -> float:
    """The exchange of ids and weights in front of the rows."""
    rows = layer.legs(layer.combine_wire)
    share = size * layer.routes.top_k / row_bytes(layer.hidden, layer.combine_wire)
    if layer.mover.packing == "per_route":
        share /= layer.routes.top_k
    return wire_seconds(rows.times(share), cluster, peers=layer.ranks)


def expert_products(layer: Layer, cluster: Cluster) -> float:
    """Seconds of one forward pass of the local experts, or of either half of the backward pass."""
    up = (2 if layer.gated else 1) * layer.width
    sizes: dict[str, Any] = {
        "rows": layer.pairs,
        "experts": layer.local_experts,
        "alignment": layer.alignment,
    }
    return grouped_product(cluster, layer.math, k=layer.hidden, n=up, **sizes) + grouped_product(
        cluster, layer.math, k=layer.width, n=layer.hidden, **sizes
    )


def layer_seconds(layer: Layer, cluster: Cluster) -> tuple[Seconds, Seconds]:
    """Forward and backward of a layer.

    Raises:
        ValueError: The machine's rate of such products is not known, or its domains are not joined.
    """
    tokens, width_bytes = float(layer.tokens), layer.hidden * layer.value_bytes
    pairs, rows = layer.pairs, layer.rows
    alone = layer.ranks == 1
    packs = 0.0 if layer.mover.packs_in_kernel or alone else (tokens + rows) * width_bytes / cluster.memory
    orders = ((tokens if alone else rows) + pairs) * width_bytes / cluster.memory
    there = wire_seconds(layer.legs(layer.dispatch_wire), cluster, peers=layer.ranks)
    back = wire_seconds(layer.legs(layer.combine_wire), cluster, peers=layer.ranks)
    latency = 0.0 if alone else cluster.exchange_latency
    apart = layer.mover.routes_apart
    with_routes = [_routes_seconds(layer, cluster, size) if apart else 0.0 for size in ROUTE_BYTES]

    products = expert_products(layer, cluster)
    activation = activation_pass(cluster, layer.math, values=pairs * layer.width, gated=layer.gated)
    weight_bytes = layer.weights * layer.value_bytes
    quantising = 0.0
    if layer.math in ("fp8", "mxfp8"):
        operands = pairs * (layer.hidden + layer.width) * layer.value_bytes
        quantising = (QUANTISING * operands + weight_bytes) / cluster.memory

    left = cluster.overhead_in_graph if layer.in_graph else 1.0
    routing = left * cluster.layer_overhead + tokens * (
        layer.routes.top_k * cluster.seconds_per_route + layer.routes.num_experts * cluster.seconds_per_score
    )
    forward = Seconds(
        route=routing,
        counts=latency if layer.mover.reads_counts else 0.0,
        pack=packs,
        dispatch=there + with_routes[0],
        unpack=orders,
        experts=products + activation + quantising,
        late=0.0,
        gather=orders,
        combine=back,
        add=packs,
        fixed=((1 + apart) * latency, latency),
    )
    late = products + weight_bytes / cluster.memory
    backward = Seconds(
        route=cluster.backward_overhead * routing,
        counts=0.0,
        pack=packs,
        dispatch=back + with_routes[1],  # the gradient of dispatch is a combine
        unpack=orders,
        experts=2 * products + ACTIVATION_BACKWARD * activation + weight_bytes / cluster.memory + quantising,
        late=late,
        gather=orders,
        combine=there,
        add=packs,
        fixed=((1 + apart) * latency, latency),
    )
    return forward, backward
