"""Settings of ranks: processes that share one model's weights."""

from __future__ import annotations

from dataclasses import dataclass

from twofold.api.errors import ConfigError
from twofold.api.settings import Checked, setting


@dataclass(frozen=True)
class ParallelConfig(Checked):
    """Ranks: one model's weights over several processes, on one machine or several.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """

    tensor_parallel_size: int = setting(
        1,
        "ranks: processes that share the model's weights; rank 0 serves and computes attention, every rank multiplies "
        "with its share. Raise it when the model exceeds one machine's memory; outputs stay the same bits",
        low=1,
        high=64,
    )
    enable_expert_parallel: bool = setting(
        True, "spread routed experts over the ranks, each expert on one; off: all experts are on rank 0"
    )
    num_redundant_experts: int = setting(
        0,
        "most used experts of each layer that every rank holds, so that no rank has all the work; needs "
        "--init-expert-location. Raise it while ranks have memory left",
        low=0,
        high=65_535,
    )
    tensor_parallel_min_bytes: int = setting(
        16 * 2**20,
        "cut matrices of at least this many bytes over the ranks; smaller ones stay on rank 0, where computing them "
        "takes less time than a message. Raise it for a slow network",
        low=0,
    )
    nnodes: int = setting(1, "machines that run ranks, the same number on each", low=1, high=64)
    node_rank: int = setting(
        0, "this machine's number, from 0; machine 0 has rank 0, which serves", low=0, high=63
    )
    master_addr: str = setting(
        "127.0.0.1", "address of machine 0 that the other machines reach; every rank listens on that network"
    )
    master_port: int = setting(
        29500, "port of machine 0 where ranks meet, with several machines", low=1, high=65_535
    )
    distributed_backend: str = setting(
        "gloo",
        "carrier of the messages between ranks: gloo (TCP, from host memory) or nccl (from the memory of a GPU of each "
        "rank; has not run on a GPU yet). Change it where the machines share a network of NCCL's alone",
        choices=("gloo", "nccl"),
    )
    distributed_timeout_s: float = setting(
        60.0,
        "seconds that a rank may be silent, at the start and in a step, before all ranks end with its name",
        low=1.0,
        high=86_400.0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_parallel_size % self.nnodes:
            raise ConfigError(
                f"--tensor-parallel-size {self.tensor_parallel_size} cannot be divided by --nnodes {self.nnodes}; "
                "give a multiple, so that every machine runs as many ranks"
            )
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"--node-rank {self.node_rank} was given with --nnodes {self.nnodes}; machines count from 0"
            )
        if self.nnodes > 1 and self.master_addr.startswith("127."):
            raise ConfigError(
                f"--nnodes {self.nnodes} was given with --master-addr {self.master_addr}, which other machines cannot "
                "reach; give the address of machine 0 in their network"
            )
        if self.num_redundant_experts and not self.enable_expert_parallel:
            raise ConfigError(
                "--num-redundant-experts and --no-enable-expert-parallel were both given; give one of them"
            )
