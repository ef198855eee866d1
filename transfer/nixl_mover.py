"""A `KVMover` on NIXL's UCX backend: host and GPU memory by the same code.

Every block is one prepared descriptor, made once for us and once per peer; a transfer names block numbers only. NIXL
itself merges neighbours into one descriptor (measured on 1.5.1: 128 adjacent blocks go as one). Its pickled descriptor
serialisation is never used: addresses travel as numbers in `MemoryDescriptor`.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from baton.transfer.mover import (
    Arrival,
    Completion,
    Incarnation,
    MemoryDescriptor,
    News,
    TransferError,
    check_block_bytes,
)

ENV_DEFAULTS = {
    # NIXL's Python logger writes every agent start at INFO to the terminal.
    "NIXL_LOG_LEVEL": "WARN",
    # UCX_TLS stays unset: UCX then picks shared memory with CMA, cuda_ipc, RDMA or TCP by itself. Measured on host
    # memory of one machine, blocks of 360 KiB and more: unset 3 to 12 GB/s, "tcp,self" 0.5 to 1.7 GB/s.
}


def set_env_defaults(environ: MutableMapping[str, str]) -> None:
    """Fill in the variables that must stand before NIXL is imported; what the user has set stays."""
    for name, value in ENV_DEFAULTS.items():
        environ.setdefault(name, value)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """Descriptors of every block of one memory."""

    descriptors: Any
    block_bytes: int


@dataclass(frozen=True, slots=True)
class _Posted:
    peer: Incarnation
    tag: bytes
    handle: Any
    num_bytes: int
    posted_s: float


class NixlMover:
    """`kv` is contiguous, its first dimension counts the blocks; the mover keeps it alive and registered until `close`.

    No NIXL progress thread: it spins a whole core. Progress is made by `poll`, so one who expects anything must poll.
    """

    def __init__(self, kv: torch.Tensor, incarnation: Incarnation) -> None:
        if kv.is_cuda:
            torch.cuda.set_device(kv.device)  # UCX registers memory in the thread's current context
        nixl: Any = importlib.import_module("nixl")
        self._nixl_errors = _error_types()
        self._kv = kv
        self._agent = nixl.nixl_agent(incarnation, nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
        if "UCX" not in self._agent.backends:
            raise TransferError(f"NIXL has no UCX backend, only {self._agent.get_plugin_list()}; reinstall nixl")
        self._registrations: list[Any] = []
        self._local = self._register(kv)
        # Taken after the registration, or peers would not know the memory.
        self._memory = MemoryDescriptor.of(kv, mover="nixl", handshake=self._agent.get_agent_metadata())
        self._staging: list[_Prepared] = []
        self._remote: dict[Incarnation, _Prepared] = {}
        self._posted: dict[int, _Posted] = {}
        self._num_posted = 0
        self._failed: list[Completion] = []  # by disconnect, for the next poll

    def describe(self) -> MemoryDescriptor:
        return self._memory

    def connect(self, peer: Incarnation, memory: MemoryDescriptor) -> None:
        self._memory.check_mover(peer, memory)
        self.disconnect(peer)
        try:
            name = self._agent.add_remote_agent(memory.handshake)
            if name.decode() != peer:
                self._agent.remove_remote_agent(name)
                raise TransferError(f"the handshake of peer {peer} names {name.decode()}: an address was reused")
            self._remote[peer] = self._prepare(peer, memory)
        except self._nixl_errors as error:
            raise TransferError(f"cannot connect to peer {peer}: {_describe(error)}") from error

    def disconnect(self, peer: Incarnation) -> None:
        for transfer, posted in list(self._posted.items()):
            if posted.peer == peer:
                self._failed.append(self._finish(transfer, f"disconnected from {peer}"))
        remote = self._remote.pop(peer, None)
        if remote is None:
            return
        remote.descriptors.release()
        with suppress(*self._nixl_errors):  # NIXL has already dropped an agent whose process it saw die
            self._agent.remove_remote_agent(peer)

    def stage(self, memory: torch.Tensor) -> int:
        try:
            self._staging.append(self._register(memory))
        except self._nixl_errors as error:
            raise TransferError(f"cannot register {memory.nbytes} bytes of staging: {_describe(error)}") from error
        return len(self._staging) - 1

    def write(
        self, peer: Incarnation, source: np.ndarray, target: np.ndarray, tag: bytes, staging: int | None = None
    ) -> int:
        remote, local = self._remote.get(peer), self._local if staging is None else self._staging[staging]
        if remote is None:
            raise TransferError(f"not connected to peer {peer}")
        check_block_bytes(peer, local.block_bytes, remote.block_bytes)
        blocks = source.astype(np.int32), target.astype(np.int32)
        posted_s = time.perf_counter()
        try:
            handle = self._agent.make_prepped_xfer(
                "WRITE", local.descriptors, blocks[0], remote.descriptors, blocks[1], notif_msg=tag
            )
        except self._nixl_errors as error:
            raise TransferError(f"cannot make a write to peer {peer}: {_describe(error)}") from error
        try:
            self._agent.transfer(handle)
        except self._nixl_errors as error:
            handle.release()
            raise TransferError(f"cannot post a write to peer {peer}: {_describe(error)}") from error
        self._num_posted += 1
        num_bytes = len(target) * remote.block_bytes
        self._posted[self._num_posted] = _Posted(peer, tag, handle, num_bytes, posted_s)
        return self._num_posted

    def poll(self) -> News:
        completions, self._failed = self._failed, []
        for transfer, posted in list(self._posted.items()):
            try:
                state = self._agent.check_xfer_state(posted.handle)
            except self._nixl_errors as error:
                completions.append(self._finish(transfer, _describe(error)))
            else:
                if state != "PROC":
                    completions.append(self._finish(transfer, None if state == "DONE" else f"NIXL state {state}"))
        notifs: dict[str, list[bytes]] = self._agent.get_new_notifs()
        arrivals = [Arrival(Incarnation(name), tag) for name, tags in notifs.items() for tag in tags]
        return News(completions, arrivals)

    def close(self) -> None:
        for peer in list(self._remote):
            self.disconnect(peer)
        for prepared in (self._local, *self._staging):
            prepared.descriptors.release()
        for registration in self._registrations:
            self._agent.deregister_memory(registration)

    def _register(self, memory: torch.Tensor) -> _Prepared:
        bare = MemoryDescriptor.of(memory, mover="nixl", handshake=b"")
        region = (bare.base_address, memory.nbytes, bare.device, "")
        self._registrations.append(self._agent.register_memory([region], bare.memory))
        return self._prepare("", bare)

    def _prepare(self, agent_name: str, memory: MemoryDescriptor) -> _Prepared:
        blocks = np.empty((memory.num_blocks, 3), dtype=np.uint64)  # rows of (address, length, device)
        blocks[:, 0] = memory.base_address + np.arange(memory.num_blocks, dtype=np.uint64) * memory.block_bytes
        blocks[:, 1] = memory.block_bytes
        blocks[:, 2] = memory.device
        return _Prepared(self._agent.prep_xfer_dlist(agent_name, blocks, memory.memory), memory.block_bytes)

    def _finish(self, transfer: int, error: str | None) -> Completion:
        posted = self._posted.pop(transfer)
        with suppress(*self._nixl_errors):  # if it cannot be cancelled, NIXL's finaliser retries when the agent goes
            posted.handle.release()
        seconds = time.perf_counter() - posted.posted_s
        return Completion(transfer, posted.peer, posted.tag, posted.num_bytes, seconds, error)


def _error_types() -> tuple[type[Exception], ...]:
    """Collect NIXL's typed exceptions, which share no base class below Exception."""
    bindings = importlib.import_module("nixl._bindings")
    found = [value for name, value in vars(bindings).items() if name.startswith("nixl") and name.endswith("Error")]
    return tuple(kind for kind in found if isinstance(kind, type) and issubclass(kind, Exception))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
