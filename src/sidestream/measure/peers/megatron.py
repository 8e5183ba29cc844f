"""megatron-core: `MoELayer` with sequential experts and its alltoall or allgather dispatcher, on a CPU.

Version 0.16.1 calls torch.cuda in places where it need not. Importing this module replaces those calls in this
process by ones that do nothing; nothing else of Sidestream may import it.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from sidestream.measure.arms import Arm
from sidestream.measure.problem import Weights
from sidestream.measure.shapes import LayerShape


class _Nothing:
    """Stands in for a CUDA stream or event: everything on a CPU happens in order anyway."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def record_event(self, event: Any = None) -> _Nothing:
        return self

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


def _stub_cuda() -> None:
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = lambda *args: _Nothing()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *args: None


with contextlib.suppress(ImportError):
    import transformers  # noqa: F401  # names torch.cuda.Stream in annotations, so it must come before the stub
_stub_cuda()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Its own version leaves CPU tensors as they are, and gloo does not take tensors as split sizes."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


moe_utils.te_general_gemm = None  # not defined without TransformerEngine, and read
token_dispatcher.maybe_move_tensor_to_cpu = _to_host


def build(name: str, shape: LayerShape, weights: Weights, dtype: torch.dtype) -> Arm:
    world = dist.get_world_size()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            1, 1, expert_model_parallel_size=world, expert_tensor_parallel_size=1
        )
    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.hidden_size,
        num_attention_heads=4,
        num_moe_experts=shape.num_experts,
        moe_ffn_hidden_size=shape.expert_hidden_size,
        moe_router_topk=shape.top_k,
        moe_router_pre_softmax=shape.top_k == 1,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type=name.removeprefix("megatron_"),
        expert_model_parallel_size=world,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )
    spec = get_gpt_layer_local_spec(num_experts=shape.num_experts, moe_grouped_gemm=False)
    layer = MoELayer(config, spec.submodules.mlp.submodules).to(dtype)
    experts = layer.experts.local_experts
    with torch.no_grad():
        layer.router.weight.copy_(weights.gate)
        for expert, gate_up, down in zip(experts, *weights.local):
            expert.linear_fc1.weight.copy_(gate_up.t())
            expert.linear_fc2.weight.copy_(down.t())

    def forward(x: Tensor) -> Tensor:
        return layer(x.unsqueeze(1))[0].squeeze(1)

    def grads() -> dict[str, Tensor]:
        return {
            "gate": layer.router.weight.grad,
            "w_gate_up": torch.stack([_grad(expert.linear_fc1.weight).t() for expert in experts]),
            "w_down": torch.stack([_grad(expert.linear_fc2.weight).t() for expert in experts]),
        }

    return Arm(f"megatron/{config.moe_token_dispatcher_type}", "peer", forward, layer, grads)


def _grad(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad
