"""torchtitan: `MoE` with its all-to-all dispatcher, which sorts locally on one rank. Experts always compute in bf16."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from sidestream.measure.arms import Arm
from sidestream.measure.problem import Weights
from sidestream.measure.shapes import LayerShape


def build(name: str, shape: LayerShape, weights: Weights, dtype: torch.dtype) -> Arm:
    set_spmd_backend("default")  # its own default needs a mesh of its trainer
    world = dist.get_world_size()
    layer = MoE.Config(
        num_experts=shape.num_experts,
        load_balance_coeff=None,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(
                dim=shape.hidden_size,
                hidden_dim=shape.expert_hidden_size,
                num_experts=shape.num_experts // world,
            ),
            token_dispatcher=AllToAllTokenDispatcher.Config(num_experts=shape.num_experts, top_k=shape.top_k),
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=shape.num_experts,
            gate=Linear.Config(in_features=shape.hidden_size, out_features=shape.num_experts),
            top_k=shape.top_k,
            score_func="softmax",
            route_norm=shape.top_k > 1,
        ),
    ).build()
    layer.to(dtype)
    experts, (w_gate_up, w_down) = layer.routed_experts.inner_experts, weights.local
    gate, up = w_gate_up.chunk(2, dim=-1)
    with torch.no_grad():
        layer.router.gate.weight.copy_(weights.gate)
        experts.w1_EFD.copy_(gate.transpose(1, 2))
        experts.w3_EFD.copy_(up.transpose(1, 2))
        experts.w2_EDF.copy_(w_down.transpose(1, 2))
    if world > 1:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
        layer.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)

    def forward(x: Tensor) -> Tensor:
        return layer(x.unsqueeze(0)).squeeze(0)

    def grads() -> dict[str, Tensor]:
        return {
            "gate": layer.router.gate.weight.grad,
            "w_gate_up": torch.cat([experts.w1_EFD.grad, experts.w3_EFD.grad], dim=1).transpose(1, 2),
            "w_down": experts.w2_EDF.grad.transpose(1, 2),
        }

    label = "torchtitan/local" if world == 1 else "torchtitan/alltoall"
    return Arm(label, "peer", forward, layer, grads)
