"""Make the mover that the config names; a library is imported only when it is chosen."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch

from baton.transfer.config import MoverKind, TransferConfig
from baton.transfer.local_mover import LocalFabric, LocalMover
from baton.transfer.mover import Incarnation, KVMover, PlainMover, TransferError, rank_name
from baton.transfer.ranked_mover import Line, RankedMover
from baton.transfer.reblock import ReblockingMover


def make_mover(
    config: TransferConfig,
    kv: torch.Tensor,
    worker: Incarnation,
    *,
    lines: Sequence[Line] = (),
    fabric: LocalFabric | None = None,
) -> KVMover:
    """Make the mover of a worker's rank 0; `lines` lead to its other ranks, which must be served by now."""
    mover = make_rank_mover(config, kv, worker, rank=0, world=1 + len(lines), fabric=fabric)
    return RankedMover(mover, lines, worker) if lines else mover


def make_rank_mover(
    config: TransferConfig,
    kv: torch.Tensor,
    worker: Incarnation,
    *,
    rank: int,
    world: int,
    fabric: LocalFabric | None = None,
) -> KVMover:
    plain = make_plain_mover(config.mover, kv, rank_name(worker, rank), fabric=fabric)
    return ReblockingMover(plain, kv, config.max_write_blocks, rank=rank, world=world)


def make_plain_mover(
    kind: MoverKind, kv: torch.Tensor, name: Incarnation, *, fabric: LocalFabric | None = None
) -> PlainMover:
    """Register `kv` (contiguous, first dimension = blocks). "auto": local where all peers share a fabric, else NIXL."""
    chosen = kind if kind != "auto" else ("nixl" if fabric is None else "local")
    if chosen == "local":
        if fabric is None:
            raise TransferError(
                'transfer.mover = "local" needs a fabric, which joins one process; use "nixl" between two'
            )
        return LocalMover(fabric, kv, name)
    if importlib.util.find_spec("nixl") is None:
        raise TransferError('transfer.mover = "nixl" needs the nixl package: pip install "baton[demo]" or "baton[gpu]"')
    from baton.transfer.nixl_mover import NixlMover

    return NixlMover(kv, name)
