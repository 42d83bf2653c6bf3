"""The nodes that serve one model together, as datatrove's executors name them in the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Nodes:
    """The nodes of one task.

    Attributes:
        rank: this node's number; 0 is the head node.
        hosts: host names or addresses of all nodes, the head node's first.
    """

    rank: int = 0
    hosts: tuple[str, ...] = ("127.0.0.1",)

    @classmethod
    def from_environment(cls) -> Self:
        """DATATROVE_NODE_RANK is -1 if each task has one node. DATATROVE_NODE_IPS may then name other tasks' nodes."""
        rank = int(os.environ.get("DATATROVE_NODE_RANK", "-1"))
        hosts = tuple(host.strip() for host in os.environ.get("DATATROVE_NODE_IPS", "").split(",") if host.strip())
        return cls(rank, hosts) if rank >= 0 and len(hosts) > 1 else cls()

    @property
    def count(self) -> int:
        return len(self.hosts)

    @property
    def head_host(self) -> str:
        return self.hosts[0]


SINGLE_NODE = Nodes()
