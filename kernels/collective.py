"""How the ranks of one model join what each has computed, on one node: sums and stacks of tensors.

Every rank calls the same operations in the same order. On CUDA nothing here waits for the device, and an operation may
be captured in a graph once one has run outside of it.
"""

# pyright: reportAttributeAccessIssue=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportPrivateImportUsage=false
# torch's stubs leave out most of what a backend has; torch's own functions would put the group into its globals.

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

LOOPBACK = "127.0.0.1"


class Collective(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks; it may take the memory of `tensor`, which is dead afterwards."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every rank's tensor, [world, *tensor.shape]: the same bits on every rank."""
        ...


@dataclass(frozen=True, slots=True)
class NoCollective:
    """One rank has everything."""

    rank: int = 0
    world: int = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[None]


class TorchCollective:
    """NCCL between GPUs, gloo over the loopback between CPU processes; a group unknown to torch's globals."""

    def __init__(self, group: c10d.ProcessGroupGloo | c10d.ProcessGroupNCCL) -> None:
        self._group = group
        self.rank, self.world = group.rank(), group.size()
        # Run on the caller's stream: the result is ready for what the caller queues next.
        self._reduce, self._gather = c10d.AllreduceOptions(), c10d.AllgatherOptions()
        self._reduce.asyncOp = self._gather.asyncOp = False

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        _finish(self._group.allreduce([tensor], self._reduce))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = tensor.new_empty(self.world, *tensor.shape)
        if tensor.numel():  # gloo refuses to move nothing
            _finish(self._group._allgather_base(gathered.flatten(0, 1), tensor, self._gather))
        return gathered

    def abort(self) -> None:
        """End what waits for a rank that is gone, here and on the device. From any thread; the group is dead then."""
        self._group.abort()


def join_ranks(rendezvous: Path, rank: int, world: int, device: torch.device, timeout_s: float) -> TorchCollective:
    """Meet the other ranks over the file `rendezvous`, which none has used before; it must outlive the group.

    `timeout_s` bounds the meeting and each operation outside of CUDA graphs.
    """
    store = dist.FileStore(str(rendezvous), world)
    if device.type == "cuda":
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        return TorchCollective(c10d.ProcessGroupNCCL(store, rank, world, options))
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = timedelta(seconds=timeout_s)
    return TorchCollective(c10d.ProcessGroupGloo(store, rank, world, options))


def _finish(work: c10d.Work | None) -> None:
    if work is not None:
        work.wait()  # on CUDA it orders streams and does not wait for the device
