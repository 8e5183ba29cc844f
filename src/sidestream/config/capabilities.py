"""What components can do, declared per class. A class that is not listed is taken to do everything."""

from dataclasses import dataclass

from omegaconf import DictConfig


@dataclass(frozen=True)
class Capabilities:
    """What a component can do. The later fields are about dispatchers.

    Attributes:
        max_expert_parallel_size: Ranks that may share the experts; None means any number.
        mixed_dtypes: Parameters may have several dtypes.
        static: A number as `capacity_factor` gives fixed shapes.
        asynchronous: A transfer goes on while the rank computes, in both passes.
        host_reads_eager: How often per layer and forward pass the host waits for the device to learn sizes, with
            exact sizes and the torch transport; None: not known. Of a library: `availability.Library`.
        host_reads_static: The same with fixed shapes; None: not known, or there is no static mode.
        packing: What travels with the torch transport, as in `predict.traffic`; None: not known, or nothing.
        library: The row of `availability.LIBRARIES` behind `transport=library`; None: there is no such transport.
    """

    max_expert_parallel_size: int | None = None
    mixed_dtypes: bool = True
    static: bool = True
    asynchronous: bool = True
    host_reads_eager: int | None = None
    host_reads_static: int | None = None
    packing: str | None = None
    library: str | None = None


def _moving(packing: str, library: str | None = None) -> Capabilities:
    return Capabilities(host_reads_eager=1, host_reads_static=0, packing=packing, library=library)


CAPABILITIES = {
    "sidestream.dispatch.none.NoDispatcher": Capabilities(static=False, host_reads_eager=0),
    "sidestream.dispatch.local.LocalDispatcher": Capabilities(
        max_expert_parallel_size=1, static=False, asynchronous=False, host_reads_eager=0
    ),
    "sidestream.dispatch.alltoall.AllToAllDispatcher": _moving("per_route"),
    "sidestream.dispatch.allgather.AllGatherDispatcher": _moving("to_all"),
    "sidestream.dispatch.nccl_ep.NcclEPDispatcher": _moving("per_rank", "nccl_ep"),
    "sidestream.dispatch.deep_ep.DeepEPDispatcher": _moving("per_rank", "deep_ep"),
    "sidestream.dispatch.hybrid_ep.HybridEPDispatcher": _moving("per_rank", "hybrid_ep"),
    "sidestream.parallel.fully_shard.FullyShard": Capabilities(mixed_dtypes=False),
}


def capabilities(node: DictConfig) -> Capabilities:
    """Returns what the component of an option can do."""
    return CAPABILITIES.get(node.get("_target_", ""), Capabilities())
