"""The CPU row of the predictor's table, measured on one rank of a group: `scripts/bench_dispatch.py --calibrate`.

Each constant is measured by itself, not fitted to layers that are predicted later: products and the activation at
shapes A and B, transfers by their size, passes over rows at one size, and what is left of a layer without width. Times
are medians of some rounds, of the slowest rank; of the layers without width the shortest, because their products are so
small that building a kernel for a new number of rows would count.

Legend: T tokens of this rank, K routes per token, E experts, D features, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from sidestream.dispatch.layout import expert_layout, sum_routes, tokens_to_slots
from sidestream.exchange.link import ThrottledLink
from sidestream.exchange.ops import Channel, new_ticket, start_, wait_
from sidestream.fusion.base import gated_activation
from sidestream.measure.arms import gemm_arm
from sidestream.measure.layer import DTYPES, Job, run_job
from sidestream.measure.problem import make_weights
from sidestream.measure.shapes import SHAPES, LayerShape
from sidestream.profiling.rounds import median, time_rounds, timed

CPU = torch.device("cpu")
PRODUCTS = ("A", "B")
WIRE_BYTES = tuple(2**power for power in range(12, 25))  # to the other ranks together: 4 KiB to 16 MiB
THIN = tuple(  # layers in which nothing takes time but routing, sorting and launching
    LayerShape(f"T{tokens} E{experts} K{top_k}", tokens, 16, 16, experts, top_k)
    for tokens, experts, top_k in ((1024, 8, 2), (4096, 8, 2), (4096, 32, 2), (4096, 32, 4), (8192, 16, 4))
)
THIN_ARMS = tuple(f"sidestream/{name}+grouped" for name in ("alltoall", "allgather", "nccl_ep"))
THROTTLED_BYTES, THROTTLED_GBPS = (2**16, 2**20), 1.0
ROWS = LayerShape("rows", 8192, 512, 512, 16, 4)
SCORES = ((4, 4, 512, 64), (2, 8, 1024, 64))  # sequences, heads, tokens, features of a head


@dataclass(frozen=True)
class Rounds:
    """How often.

    Attributes:
        rounds, warmup: Of every kernel and transfer.
        layers: Of every thin layer.
    """

    rounds: int
    warmup: int
    layers: int


def run_plain(plain: dict[str, Any], *, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Measure everything. Collective.

    Args:
        plain: `conf`: folder of the configuration; `seed`; and the fields of `Rounds`.

    Returns:
        One record of raw times, in seconds; `sidestream.predict.calibration` makes a row of it.
    """
    often = Rounds(plain["rounds"], plain["warmup"], plain["layers"])
    found: dict[str, Any] = {"ranks": dist.get_world_size()}
    for dtype in DTYPES:
        say(f"products, activation, attention: {dtype}")
        found[dtype] = {
            "products": [_products(SHAPES[name], dtype, often, plain["seed"]) for name in PRODUCTS],
            "activation": [_activation(SHAPES[name], dtype, often) for name in PRODUCTS],
            "scores": [_scores(sizes, dtype, often) for sizes in SCORES],
        }
    say("transfers")
    found["wire"] = [{"bytes": size, "seconds": _transfer(size, often)} for size in WIRE_BYTES]
    found["throttled"] = [_throttled(size, often) for size in THROTTLED_BYTES]
    say("passes over rows")
    found["rows"] = _rows(often)
    say("layers without width")
    found["thin"] = _thin(often, plain["conf"], plain["seed"], say)
    return [found]


def _median(part: Callable[[], object], often: Rounds) -> float:
    """Seconds of the slowest rank."""
    return _medians([part], often)[0]


def _medians(parts: Sequence[Callable[[], object]], often: Rounds) -> list[float]:
    """The same of parts that run one after another."""

    def measure(number: int, index: int) -> list[float]:
        return [timed(part, CPU) for part in parts]

    seconds = time_rounds(1, measure, parts=len(parts), rounds=often.rounds, warmup=often.warmup, seed=0)
    return median(seconds[:, 0]).tolist()


def _products(shape: LayerShape, dtype: str, often: Rounds, seed: int) -> dict[str, Any]:
    """The six products of the experts, rows evenly shared out."""
    weights = make_weights(
        shape,
        dtype=DTYPES[dtype],
        seed=seed,
        skew=0.0,
        skew_order="contiguous",
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    work: Any = gemm_arm(shape, weights, dtype=DTYPES[dtype]).module
    forward, backward = _medians([work.forward_products, work.backward_products], often)
    flops = 6 * shape.tokens * shape.top_k * shape.hidden_size * shape.expert_hidden_size
    return {"shape": shape.name, "forward_flops": flops, "forward": forward, "backward": backward}


def _activation(shape: LayerShape, dtype: str, often: Rounds) -> dict[str, Any]:
    """Between the products, forward and backward."""
    rows, width = shape.tokens * shape.top_k, shape.expert_hidden_size
    gate_up = torch.randn(rows, 2 * width).to(DTYPES[dtype]).requires_grad_()
    weights = torch.rand(rows)
    kept: list[Tensor] = []

    def forward() -> None:
        kept[:] = [gated_activation(gate_up, weights)]

    gradient = torch.ones(rows, width, dtype=DTYPES[dtype])

    def backward() -> None:
        gate_up.grad = None
        kept[0].backward(gradient)

    times = _medians([forward, backward], often)
    return {"shape": shape.name, "values": rows * width, "forward": times[0], "backward": times[1]}


def _scores(sizes: tuple[int, int, int, int], dtype: str, often: Rounds) -> dict[str, Any]:
    """Causal attention without its projections."""
    sequences, heads, length, width = sizes
    query, key, value = (torch.randn(*sizes).to(DTYPES[dtype]).requires_grad_() for _ in range(3))
    kept: list[Tensor] = []

    def forward() -> None:
        kept[:] = [F.scaled_dot_product_attention(query, key, value, is_causal=True)]

    def backward() -> None:
        query.grad = key.grad = value.grad = None
        kept[0].backward(torch.ones_like(kept[0]))

    times = _medians([forward, backward], often)
    flops = 2 * sequences * heads * length**2 * width  # half of the square, two products
    return {"sizes": list(sizes), "forward_flops": flops, "forward": times[0], "backward": times[1]}


def _transfer(size: int, often: Rounds) -> float:
    """An even all-to-all in which a rank sends `size` bytes to the others together."""
    ranks = dist.get_world_size()
    sent = torch.ones(size * ranks // max(1, ranks - 1) // ranks * ranks, dtype=torch.uint8)
    received = torch.empty_like(sent)
    return _median(lambda: dist.all_to_all_single(received, sent), often)


def _throttled(size: int, often: Rounds) -> dict[str, float]:
    """The same over an emulated link, as training makes transfers: what is longer than the link's own time."""
    ranks = dist.get_world_size()
    channel = Channel(dist.group.WORLD, ThrottledLink(gbps=THROTTLED_GBPS))
    sent = torch.ones(ranks, size // max(1, ranks - 1), dtype=torch.uint8)
    received, one = torch.empty_like(sent), torch.ones(ranks, dtype=torch.int64)

    def transfer() -> None:
        ticket = new_ticket()
        start_(received, sent, one, one, channel.id, ticket, "dispatch")
        wait_(received, channel.id, ticket)

    seconds = _median(transfer, often)
    channel.close()
    travels = sent.shape[1] * (ranks - 1)
    return {"bytes": travels, "seconds": seconds, "link_seconds": travels * 8e-9 / THROTTLED_GBPS}


def _rows(often: Rounds) -> dict[str, Any]:
    """Tokens into the order of their experts, and their sum back."""
    tokens, top_k = ROWS.tokens, ROWS.top_k
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(tokens, ROWS.num_experts, generator=generator).topk(top_k).indices
    layout = expert_layout(
        ids.reshape(-1), num_experts=ROWS.num_experts, num_slots=tokens * top_k, complete=True
    )
    x = torch.randn(tokens, ROWS.hidden_size, generator=generator).bfloat16()
    kept: list[Tensor] = []

    def order() -> None:
        kept[:] = [tokens_to_slots(x, layout, top_k=top_k)]

    times = _medians([order, lambda: sum_routes(kept[0], layout, top_k=top_k)], often)
    moved = (tokens + tokens * top_k) * ROWS.hidden_size * x.element_size()
    return {"bytes": moved, "order": times[0], "sum": times[1]}


def _thin(often: Rounds, conf: str, seed: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Whole layers with 16 features, of all dispatchers."""
    job = Job(
        shapes=list(THIN),
        arms=list(THIN_ARMS),
        peers=[],
        dtype="bf16",
        rounds=often.layers,
        warmup=often.warmup,
        frozen_rounds=0,
        skew=0.0,
        skew_order="contiguous",
        seed=seed,
        conf=conf,
    )
    found = []
    for record in run_job(job, say=lambda _: None):
        arms = [record["arms"][name]["rounds_ms"] for name in THIN_ARMS]
        forward = [min(times["forward"]) for times in arms]
        backward = [
            min(both - first for both, first in zip(times["forward_backward"], times["forward"]))
            for times in arms
        ]
        found.append(
            {
                "tokens": record["tokens"],
                "num_experts": record["num_experts"],
                "top_k": record["top_k"],
                "forward": sum(forward) / len(arms) / 1e3,
                "backward": sum(backward) / len(arms) / 1e3,
            }
        )
    return found
