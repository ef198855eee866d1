"""Make the mover that the config names; a library is imported only when it is chosen."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.transfer.config import MoverKind, TransferConfig
from baton.transfer.local_mover import LocalFabric, LocalMover
from baton.transfer.mover import Incarnation, KVMover, PlainMover, TransferError, rank_name
from baton.transfer.ranked_mover import Line, RankedMover
from baton.transfer.reblock import ReblockingMover
from baton.transfer.verified_mover import VerifiedMover

log = logging.getLogger(__name__)
INSTALL_NIXL = 'pip install "baton[demo]" or "baton[gpu]"'


@dataclass(frozen=True, slots=True)
class MoverPlace:
    """Where a mover lives: what peers reach it by, and the fabric of a process whose movers are all local."""

    host: str = "127.0.0.1"
    fabric: LocalFabric | None = None


def make_mover(
    config: TransferConfig, kv: torch.Tensor, worker: Incarnation, place: MoverPlace, lines: Sequence[Line] = ()
) -> KVMover:
    """Make the mover of a worker's rank 0; `lines` lead to its other ranks, which must be served by now."""
    mover = make_rank_mover(config, kv, worker, place, rank=0, world=1 + len(lines))
    log.info("KV moves over %s (transfer.mover = %s)", mover.describe().mover, config.mover)
    return RankedMover(mover, lines, worker, place.host) if lines else mover


def make_rank_mover(
    config: TransferConfig, kv: torch.Tensor, worker: Incarnation, place: MoverPlace, *, rank: int, world: int
) -> KVMover:
    plain = make_plain_mover(config.mover, kv, rank_name(worker, rank), place)
    if config.verify:
        plain = VerifiedMover(plain, kv)
    return ReblockingMover(plain, kv, config.max_write_blocks, rank=rank, world=world, compress=config.compress)


def make_plain_mover(kind: MoverKind, kv: torch.Tensor, name: Incarnation, place: MoverPlace) -> PlainMover:
    """Register `kv` (contiguous, first dimension = blocks). "auto": local in a fabric, else NIXL, else NCCL or gloo."""
    if kind == "local" or (kind == "auto" and place.fabric is not None):
        if place.fabric is None:
            raise TransferError('transfer.mover = "local" needs a fabric, which joins one process; use "auto"')
        return LocalMover(place.fabric, kv, name)
    if kind == "nccl":
        return _make_nccl(kv, name, place)
    try:
        return _make_nixl(kv, name)
    except TransferError as error:
        if kind != "auto":
            raise
        log.warning('transfer.mover = "auto": no NIXL here, so KV moves over NCCL, or gloo between CPUs (%s)', error)
        return _make_nccl(kv, name, place)


def _make_nixl(kv: torch.Tensor, name: Incarnation) -> PlainMover:
    if importlib.util.find_spec("nixl") is None:
        raise TransferError(f'transfer.mover = "nixl" needs the nixl package: {INSTALL_NIXL}')
    from baton.transfer.nixl_mover import NixlMover

    return NixlMover(kv, name)


def _make_nccl(kv: torch.Tensor, name: Incarnation, place: MoverPlace) -> PlainMover:
    from baton.transfer.nccl_mover import NcclMover

    return NcclMover(kv, name, place.host)
