"""transformers: the Qwen3-MoE block on one rank, its experts behind `AllToAllEP` on several.

Routing weights are applied behind the experts, in bf16 for a bf16 model. Experts run with `grouped_mm`, its default.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.expert_parallel import EPImplementationInterface
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from sidestream.measure.arms import Arm
from sidestream.measure.problem import Weights
from sidestream.measure.shapes import LayerShape


def build(name: str, shape: LayerShape, weights: Weights, dtype: torch.dtype) -> Arm:
    config = Qwen3MoeConfig(
        hidden_size=shape.hidden_size,
        moe_intermediate_size=shape.expert_hidden_size,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        norm_topk_prob=shape.top_k > 1,
    )
    config._experts_implementation = "grouped_mm"
    block: Any = Qwen3MoeSparseMoeBlock(config).to(dtype)
    experts, (w_gate_up, w_down) = block.experts, weights.local
    with torch.no_grad():
        block.gate.weight.copy_(weights.gate)
        experts.gate_up_proj = torch.nn.Parameter(w_gate_up.transpose(1, 2).contiguous())
        experts.down_proj = torch.nn.Parameter(w_down.transpose(1, 2).contiguous())
    world = dist.get_world_size()
    if world > 1:
        experts.num_experts = shape.num_experts // world
        experts._is_expert_parallel = True
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("ep", "tp"))
        implementation = EPImplementationInterface._global_mapping["all_to_all"](
            experts, mesh["ep"], mesh["tp"]
        )
        experts.forward = lambda hidden, ids, route_weights: implementation(hidden, ids, route_weights)

    def forward(x: Tensor) -> Tensor:
        return block(x.unsqueeze(0)).squeeze(0)

    def grads() -> dict[str, Tensor]:
        return {
            "gate": block.gate.weight.grad,
            "w_gate_up": experts.gate_up_proj.grad.transpose(1, 2),
            "w_down": experts.down_proj.grad.transpose(1, 2),
        }

    label = "transformers/qwen3_moe" if world == 1 else "transformers/AllToAllEP"
    return Arm(label, "peer", forward, block, grads)
