"""Rows and bytes that an exchange moves. Source of the formulas: DeepEP (its expected number of destinations is the
same expression), checked against bytes that a real run printed: docs/predictor.md.

Uniform routing without replacement: the K experts of a token are K different ones of those it can reach.

Legend: T tokens of a rank, K routes per token, E experts, R ranks, b bytes of a row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

Packing = Literal["per_route", "per_rank", "per_node", "to_all"]
Wire = Literal["fp32", "bf16", "fp8", "mxfp8"]

FP8_BLOCK, MXFP8_BLOCK = 128, 32  # values that share a scale of 4 bytes, of 1 byte
ID_AND_WEIGHT_BYTES = 12  # of a route: int64 expert, fp32 weight


def row_bytes(hidden_size: int, wire: Wire) -> float:
    """Bytes of one row of values, scales included."""
    match wire:
        case "fp32":
            return 4.0 * hidden_size
        case "bf16":
            return 2.0 * hidden_size
        case "fp8":
            return hidden_size + 4.0 * hidden_size / FP8_BLOCK
        case "mxfp8":
            return hidden_size + hidden_size / MXFP8_BLOCK


@dataclass(frozen=True)
class Routes:
    """How tokens choose.

    Attributes:
        num_experts, top_k: E, K.
        num_groups, top_groups: Group-limited routing: K experts out of `top_groups` of `num_groups` equal groups.
            1 and 1: no limit.
    """

    num_experts: int
    top_k: int
    num_groups: int = 1
    top_groups: int = 1


def destinations(routes: Routes, parts: int) -> float:
    """Expected number of `parts` equal shares of the experts that a token has an expert in: ranks, nodes, domains."""
    share = routes.num_experts / parts
    return sum(1 - _missed(routes, part * share, (part + 1) * share) for part in range(parts))


@cache
def _missed(routes: Routes, begin: float, end: float) -> float:
    """Probability that a token chooses no expert from `begin` to `end`."""
    size = routes.num_experts / routes.num_groups
    # (groups of the part that a token keeps, experts that it then can reach there) -> number of ways to keep them
    ways: dict[tuple[int, float], int] = {(0, 0.0): 1}
    inside = 0
    for group in range(routes.num_groups):
        common = min(end, (group + 1) * size) - max(begin, group * size)
        if common <= 0:
            continue
        inside += 1
        for (kept, marked), number in list(ways.items()):
            key = (kept + 1, marked + common)
            ways[key] = ways.get(key, 0) + number
    outside, chosen = routes.num_groups - inside, routes.top_groups
    total, reachable = math.comb(routes.num_groups, chosen), size * chosen
    return sum(
        number * math.comb(outside, chosen - kept) / total * _misses(reachable, marked, routes.top_k)
        for (kept, marked), number in ways.items()
        if kept <= chosen
    )


def _misses(total: float, marked: float, draws: int) -> float:
    """Probability that `draws` of `total` without replacement hit none of `marked`, which need not be whole."""
    chance = 1.0
    for drawn in range(draws):
        chance *= max(0.0, total - marked - drawn) / (total - drawn)
    return chance


@dataclass(frozen=True)
class Legs:
    """Bytes of one exchange that a rank sends, and as many receives.

    Attributes:
        fast: To ranks of its own domain, without itself.
        slow: To other domains.
        logical_fast, logical_slow: What published bandwidths count: with the rank's, and the domain's, own part.
    """

    fast: float
    slow: float
    logical_fast: float
    logical_slow: float

    def times(self, factor: float) -> Legs:
        """So many times as much of everything."""
        return Legs(
            factor * self.fast, factor * self.slow, factor * self.logical_fast, factor * self.logical_slow
        )


def rows_sent(packing: Packing, routes: Routes, *, tokens: int, ranks: int) -> float:
    """Rows that leave a rank's packing, those for itself included; as many arrive."""
    match packing:
        case "per_route":
            return float(tokens * routes.top_k)
        case "to_all":
            return float(tokens * ranks)
        case _:
            return tokens * destinations(routes, ranks)


def legs(packing: Packing, routes: Routes, *, tokens: int, ranks: int, per_domain: int, row: float) -> Legs:
    """Bytes of one exchange.

    Args:
        packing: `per_route`: a row per route. `per_rank`: one per rank that has an expert of the token. `per_node`: the
            same, and between domains one per domain, which its receiver hands on. `to_all`: every token to all.
        tokens: T.
        ranks: R.
        per_domain: Ranks of a domain, at most R.
        row: b.
    """
    per_domain = min(per_domain, ranks)
    domains = ranks // per_domain
    sent = rows_sent(packing, routes, tokens=tokens, ranks=ranks) * row
    fast, slow = sent * (per_domain - 1) / ranks, sent * (ranks - per_domain) / ranks
    if packing != "per_node":
        return Legs(fast, slow, sent * per_domain / ranks, sent)
    # Rows of all domains meet in the domain of their experts, so inside it travels what the ranks of all domains sent.
    between = tokens * destinations(routes, domains) * row
    return Legs(sent * (per_domain - 1) / per_domain, between * (domains - 1) / domains, sent, between)
