"""The equations of ScMoE (arXiv 2404.05019) on plain tensors: one process, every expert on every token.

A pair of blocks, dense then MoE, as in equations 7 to 10, with the norms that the authors leave out:

    mh   = h + Attention(h)                         (10)
    mlp  = mh + MLP(mh)                             (9)
    now  = mlp + Attention'(mlp)                    (8)
    out  = now + mix(SE(now), sum_i G(tap)_i E_i(tap))            (7, 14-17)
    out  = now + sum_i G(now)_i E_i(now) + G(tap)_i E_i(tap)      (23), never the same expert twice

`tap` is mlp (pos1), mh (pos2) or h (pos3). A lone MoE block is the second half: mlp is its input.

Weights come by the names that the model gives its parameters, and everything is computed in their dtype.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Paper:
    """What is varied.

    Attributes:
        tap: pos1, pos2, pos3.
        mix: add, cg1, cg2.
        double_gating: Equation 23.
        top_k: Routed experts per token and gate.
        num_heads, num_kv_heads, rope_theta, norm_eps: Of the model.
        windows: Last tokens that a token attends to, in the dense and in the MoE block; None: all.
        literal_gate: Equations 2 and 3 to the letter: a softmax over the chosen experts only.
        distinct: With two gates: the second never takes the expert that the first took (appendix A.2).
    """

    tap: str
    mix: str = "add"
    double_gating: bool = False
    top_k: int = 1
    num_heads: int = 4
    num_kv_heads: int = 2
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    windows: tuple[int | None, int | None] = (None, None)
    literal_gate: bool = False
    distinct: bool = True


def norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm; none without a weight."""
    if weight is None:
        return x
    return weight * x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps)


def swish(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def feed_forward(x: Tensor, w: Weights, name: str) -> Tensor:
    both = x @ w[f"{name}.gate_up.weight"].T
    half = both.shape[-1] // 2
    return (swish(both[..., :half]) * both[..., half:]) @ w[f"{name}.down.weight"].T


def rotate(x: Tensor, theta: float) -> Tensor:
    """`[sequence, width]`: feature j turns with feature j + width / 2."""
    length, width = x.shape
    turned = torch.empty_like(x)
    for j in range(width // 2):
        angle = torch.arange(length).to(x) * theta ** (-2 * j / width)
        a, b = x[:, j], x[:, j + width // 2]
        turned[:, j] = a * torch.cos(angle) - b * torch.sin(angle)
        turned[:, j + width // 2] = b * torch.cos(angle) + a * torch.sin(angle)
    return turned


def attention(h: Tensor, w: Weights, block: str, paper: Paper) -> Tensor:
    """`[sequence, features]` -> what attention adds."""
    x = norm(h, w[f"{block}.attention_norm.weight"], paper.norm_eps)
    heads, kv_heads = paper.num_heads, paper.num_kv_heads
    projected = (x @ w[f"{block}.self_attention.qkv.weight"].T).split(x.shape[1] // heads, dim=1)
    queries, keys, values = (
        projected[:heads],
        projected[heads : heads + kv_heads],
        projected[heads + kv_heads :],
    )
    ones, window = torch.ones(len(x), len(x), dtype=torch.bool), paper.windows[block == "unit"]
    hidden = ones.triu(1) if window is None else ones.triu(1) | ones.tril(-window)
    outputs = []
    for number, query in enumerate(queries):
        group = number * kv_heads // heads
        q, k = rotate(query, paper.rope_theta), rotate(keys[group], paper.rope_theta)
        scores = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(hidden, -torch.inf)
        outputs.append(softmax(scores) @ values[group])
    return torch.cat(outputs, dim=1) @ w[f"{block}.self_attention.out.weight"].T


def softmax(x: Tensor) -> Tensor:
    e = torch.exp(x - x.max(dim=-1, keepdim=True).values)
    return e / e.sum(dim=-1, keepdim=True)


def gate(x: Tensor, w: Weights, paper: Paper, forbidden: list[list[int]]) -> tuple[Tensor, list[list[int]]]:
    """`[tokens, experts]` weights G(x), zero where not chosen, and the chosen experts of each token.

    The softmax runs over all experts before the best are chosen: one chosen expert alone would always weigh 1 and
    teach the gate nothing. Several are divided by their sum, which makes them equations 2 and 3.
    """
    logits = x @ w["moe.gate"].T
    probabilities, chosen, rows = softmax(logits), [], []
    for token in range(len(x)):
        order = sorted(range(logits.shape[1]), key=lambda e: -logits[token, e].item())
        best = [expert for expert in order if expert not in forbidden[token]][: paper.top_k]
        chosen.append(best)
        picked = (softmax(logits[token, best]) if paper.literal_gate else probabilities[token, best]).clone()
        if paper.top_k > 1:
            picked = picked / picked.sum()
        rows.append(torch.zeros_like(logits[token]).index_put((torch.tensor(best),), picked))
    return torch.stack(rows), chosen


def experts(x: Tensor, weights: Tensor, w: Weights) -> Tensor:
    """sum_i G(x)_i E_i(x): every expert works on every token."""
    total = torch.zeros_like(x)
    for number, (gate_up, down) in enumerate(zip(w["moe.experts.w_gate_up"], w["moe.experts.w_down"])):
        both = x @ gate_up
        half = both.shape[1] // 2
        total = total + weights[:, number, None] * ((swish(both[:, :half]) * both[:, half:]) @ down)
    return total


def routed(x: Tensor, w: Weights, paper: Paper, forbidden: list[list[int]]) -> tuple[Tensor, list[list[int]]]:
    weights, chosen = gate(x, w, paper, forbidden)
    return experts(x, weights, w), chosen


def mixed(shared: Tensor, of_tap: Tensor, x: Tensor, w: Weights, paper: Paper) -> Tensor:
    """Equations 14 to 17. `x` is what the shared expert reads."""
    if paper.mix == "add":
        return shared + of_tap
    scores = x @ w["extra.mix.weight"].T
    if paper.mix == "cg1":
        return shared / (1 + torch.exp(-scores)) + of_tap
    shares = softmax(scores)
    return shares[:, :1] * shared + shares[:, 1:] * of_tap


def pair(h: Tensor, unit: Weights, before: Weights | None, paper: Paper) -> tuple[Tensor, list[list[int]]]:
    """One sequence `[tokens, features]` through the pair; the experts chosen by the tap, then by `now`.

    Args:
        h: The residual stream in front.
        unit: Weights of the MoE block.
        before: Of the dense block in front; None: there is none.
        paper: The variant.
    """
    eps, taps = paper.norm_eps, {"pos3": h}
    mlp = h
    if before is not None:
        b = {f"before.{name}": value for name, value in before.items()}
        taps["pos2"] = mh = h + attention(h, b, "before", paper)
        mlp = mh + feed_forward(norm(mh, before["norm.weight"], eps), b, "before.ffn")
    taps["pos1"] = mlp
    now = mlp + attention(mlp, {f"unit.{name}": value for name, value in unit.items()}, "unit", paper)
    tap = norm(taps[paper.tap], unit.get("extra.tap_norm.weight"), eps)
    current = norm(now, unit["norm.weight"], eps)
    anything: list[list[int]] = [[] for _ in h]
    of_tap, chosen = routed(tap, unit, paper, anything)
    if paper.double_gating:
        of_current, second = routed(current, unit, paper, chosen if paper.distinct else anything)
        both, chosen = of_tap + of_current, [a + b for a, b in zip(chosen, second)]
    elif "moe.shared_expert.down.weight" in unit:
        both = mixed(feed_forward(current, unit, "moe.shared_expert"), of_tap, current, unit, paper)
    else:
        both = of_tap
    if "extra.post_norm.weight" in unit:
        both = norm(both, unit["extra.post_norm.weight"], eps)
    return now + both, chosen
