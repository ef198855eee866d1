"""Make the mover that the config names; NIXL is imported only when it is chosen."""

from __future__ import annotations

import importlib.util

import torch

from baton.transfer.config import MoverKind
from baton.transfer.local_mover import LocalFabric, LocalMover
from baton.transfer.mover import Incarnation, KVMover, TransferError


def make_mover(
    kind: MoverKind, kv: torch.Tensor, incarnation: Incarnation, *, fabric: LocalFabric | None = None
) -> KVMover:
    """Register `kv` (contiguous, first dimension = blocks). "auto": local where all peers share a fabric, else NIXL."""
    chosen = kind if kind != "auto" else ("nixl" if fabric is None else "local")
    if chosen == "local":
        if fabric is None:
            raise TransferError(
                'transfer.mover = "local" needs a fabric, which joins one process; use "nixl" between two'
            )
        return LocalMover(fabric, kv, incarnation)
    if importlib.util.find_spec("nixl") is None:
        raise TransferError('transfer.mover = "nixl" needs the nixl package: pip install "baton[demo]" or "baton[gpu]"')
    from baton.transfer.nixl_mover import NixlMover

    return NixlMover(kv, incarnation)
