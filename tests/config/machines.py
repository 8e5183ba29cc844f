"""Made-up machines."""

from dataclasses import replace

from sidestream.config.availability import Machine

LAPTOP = Machine(nvcc=None, torch="2.13.0+cpu")
MAC = replace(LAPTOP, platform="darwin")
H100 = Machine(
    device_type="cuda",
    gpus=8,
    gpu_names=("NVIDIA H100 80GB HBM3",),
    capability=(9, 0),
    modules=frozenset({"nccl.ep", "nccl.core", "deep_ep", "deep_ep.ElasticBuffer"}),
    nvcc="/usr/local/cuda/bin/nvcc",
    nccl="2.30.7",
    torch="2.13.0",
)
H100_WITHOUT_NVCC = replace(H100, nvcc=None)
H100_BARE = replace(H100, modules=frozenset(), nccl="2.29.7")  # as torch comes
H100_HYBRID = replace(H100, modules=frozenset({"nccl.ep", "nccl.core", "deep_ep", "deep_ep.HybridEPBuffer"}))
H100_PLACEHOLDER = replace(H100, modules=frozenset({"deep_ep"}))
H100_OLD_NCCL = replace(H100, nccl="2.29.7")
H100_NEW_NCCL = replace(H100, nccl="2.31.0")
ONE_H100 = replace(H100_HYBRID, gpus=1)
A100 = replace(H100, gpu_names=("NVIDIA A100-SXM4-80GB",), capability=(8, 0))
UNKNOWN_GPU = replace(H100, gpu_names=(), capability=None, nccl=None)

MACHINES = {name.lower(): value for name, value in list(globals().items()) if isinstance(value, Machine)}
