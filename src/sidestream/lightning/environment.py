"""Tells Lightning which rank this process is. The processes were started by our launcher or by torchrun."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import ClusterEnvironment

from sidestream.launch.worker import RankEnv


class RankEnvironment(ClusterEnvironment):
    """A `RankEnv` in Lightning's terms."""

    def __init__(self, env: RankEnv) -> None:
        super().__init__()
        self.env = env

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        return False  # only ever passed explicitly

    def world_size(self) -> int:
        return self.env.world_size

    def set_world_size(self, size: int) -> None:
        assert size == self.env.world_size, f"Lightning counts {size} ranks, there are {self.env.world_size}"

    def global_rank(self) -> int:
        return self.env.rank

    def set_global_rank(self, rank: int) -> None:
        assert rank == self.env.rank, f"Lightning takes this rank for {rank}, it is {self.env.rank}"

    def local_rank(self) -> int:
        return self.env.local_rank

    def node_rank(self) -> int:
        return self.env.rank // self.env.local_world_size
