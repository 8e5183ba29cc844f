"""What follows from a config and the number of its ranks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Sizes that `compatibility.check` derives; never in YAML.

    Attributes:
        local_world_size: Ranks on this machine.
        expert_data_parallel_size: Copies of each expert.
        micro_batch_size: Sequences per rank in one forward pass.
        accumulation: Forward passes per optimizer step.
        device_type: `cpu` or `cuda`.
    """

    world_size: int
    local_world_size: int
    expert_parallel_size: int
    expert_data_parallel_size: int
    micro_batch_size: int
    accumulation: int
    device_type: str
