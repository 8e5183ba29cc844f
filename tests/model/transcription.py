"""The model written down once more from the papers: plain tensors, one document, one token and one head at a time.

No masks, no position tables, no dispatch. Weights are taken by their names in the state dict.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sidestream.model.config import ModelShape

Weights = dict[str, Tensor]


def log_likelihood(weights: Weights, shape: ModelShape, tokens: Tensor, *, top_k: int) -> Tensor:
    """Log-probabilities `[S, V]` of what follows each token of one document `[S]`."""
    h = weights["embedding.weight"][tokens]
    for index in range(shape.num_layers):
        block = {
            name.removeprefix(f"blocks.{index}."): w
            for name, w in weights.items()
            if name.startswith(f"blocks.{index}.")
        }
        x = rms(h, block["attention_norm.weight"], shape.norm_eps)
        attend = grouped_query if shape.mla is None else latent
        h = h + attend(block, shape, x, window=window_of(shape, index))
        x = rms(h, block["norm.weight"], shape.norm_eps)
        if "moe.gate" in block:
            h = h + torch.stack([moe(block, shape, token, top_k) for token in x])
        else:
            h = h + swiglu(x, block["ffn.gate_up.weight"].t(), block["ffn.down.weight"].t())
    head = weights["embedding.weight"] if shape.tie_embeddings else weights["head.weight"]
    return torch.log_softmax(rms(h, weights["final_norm.weight"], shape.norm_eps) @ head.t(), dim=-1)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def swiglu(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    width = down.shape[0]
    gate, up = x @ gate_up[:, :width], x @ gate_up[:, width:]
    return (gate * torch.sigmoid(gate) * up) @ down


def window_of(shape: ModelShape, index: int) -> int | None:
    full = shape.full_attention_layers
    is_full = (index + 1) % full == 0 if isinstance(full, int) else index in full
    return None if is_full else shape.sliding_window


def rotate(x: Tensor, position: int, theta: float) -> Tensor:
    """Feature i and i + D/2 are a complex number, turned by `position * theta ** (-2 i / D)`."""
    half = x.shape[0] // 2
    angle = position * theta ** (-2 * torch.arange(half) / x.shape[0])
    turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones(half), angle)
    return torch.cat([turned.real, turned.imag])


def weigh(queries: list[Tensor], keys: list[Tensor], values: list[Tensor], window: int | None) -> Tensor:
    """One head: each token's softmax over the tokens it may see. `[S, D]`."""
    out = []
    for t, q in enumerate(queries):
        first = 0 if window is None else max(0, t - window + 1)
        scores = torch.stack([q @ k for k in keys[first : t + 1]]) / q.shape[0] ** 0.5
        out.append(torch.softmax(scores, 0) @ torch.stack(values[first : t + 1]))
    return torch.stack(out)


def grouped_query(block: Weights, shape: ModelShape, x: Tensor, *, window: int | None) -> Tensor:
    d = shape.head_dim or shape.hidden_size // shape.num_heads
    n, g, eps = shape.num_heads, shape.num_kv_heads, shape.norm_eps
    w_q, w_k, w_v = block["self_attention.qkv.weight"].split([n * d, g * d, g * d])
    q, k, v = x @ w_q.t(), x @ w_k.t(), x @ w_v.t()
    if shape.qk_norm == "full":
        q = rms(q, block["self_attention.q_norm.weight"], eps)
        k = rms(k, block["self_attention.k_norm.weight"], eps)
    heads = []
    for head in range(n):
        group = head // (n // g)
        q_head, k_head, v_head = (y[:, i * d : (i + 1) * d] for y, i in ((q, head), (k, group), (v, group)))
        if shape.qk_norm == "head":
            q_head = rms(q_head, block["self_attention.q_norm.weight"], eps)
            k_head = rms(k_head, block["self_attention.k_norm.weight"], eps)
        turned = [[rotate(y, t, shape.rope_theta) for t, y in enumerate(ys)] for ys in (q_head, k_head)]
        heads.append(weigh(*turned, list(v_head), window))
    return torch.cat(heads, dim=1) @ block["self_attention.out.weight"].t()


def latent(block: Weights, shape: ModelShape, x: Tensor, *, window: int | None) -> Tensor:
    """arXiv 2405.04434, equations 9 to 13 and 14 to 19."""
    mla, theta = shape.mla, shape.rope_theta
    w = {name.removeprefix("self_attention."): value.t() for name, value in block.items() if value.dim() == 2}
    if mla.q_lora_rank is None:
        q = x @ w["q.weight"]
    else:
        q = rms(x @ w["q_a.weight"], block["self_attention.q_norm.weight"], shape.norm_eps) @ w["q_b.weight"]
    down = x @ w["kv_a.weight"]
    c = rms(down[:, : mla.kv_lora_rank], block["self_attention.kv_norm.weight"], shape.norm_eps)
    k_rope = [rotate(y, t, theta) for t, y in enumerate(down[:, mla.kv_lora_rank :])]
    q_heads, kv_heads = q.chunk(shape.num_heads, dim=1), (c @ w["kv_b.weight"]).chunk(shape.num_heads, dim=1)
    nope, heads = mla.qk_nope_head_dim, []
    for q_head, kv_head in zip(q_heads, kv_heads):
        queries = [torch.cat([y[:nope], rotate(y[nope:], t, theta)]) for t, y in enumerate(q_head)]
        keys = [torch.cat([y[:nope], shared]) for y, shared in zip(kv_head, k_rope)]
        heads.append(weigh(queries, keys, [y[nope:] for y in kv_head], window))
    return torch.cat(heads, dim=1) @ w["out.weight"]


def moe(block: Weights, shape: ModelShape, x: Tensor, top_k: int) -> Tensor:
    """Softmax over all experts, the `top_k` largest, normalised; and the shared expert. `x` is one token `[H]`."""
    chosen = torch.softmax(block["moe.gate"] @ x, 0).topk(top_k)
    weights = chosen.values / chosen.values.sum() if top_k > 1 else chosen.values
    y = torch.zeros_like(x)
    for weight, e in zip(weights, chosen.indices):
        y = y + weight * swiglu(x, block["moe.experts.w_gate_up"][e], block["moe.experts.w_down"][e])
    if shape.num_shared_experts:
        gate_up, down = block["moe.shared_expert.gate_up.weight"], block["moe.shared_expert.down.weight"]
        width = shape.shared_expert_hidden_size or shape.num_shared_experts * shape.expert_hidden_size
        assert down.shape == (shape.hidden_size, width)
        shared = swiglu(x, gate_up.t(), down.t())
        if shape.shared_expert_gate:
            shared = torch.sigmoid(F.linear(x, block["moe.shared_expert.output_gate.weight"])) * shared
        y = y + shared
    return y
