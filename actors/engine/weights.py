"""From a source of named tensors to the layers that a model is made of.

A source knows files and formats; `Weights` knows the layout in memory: what is merged, what a rank keeps of it, its
dtype and device. Every tensor goes straight to its place, so nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Protocol

import torch

from baton.kernels.collective import Collective, NoCollective
from baton.kernels.linear import Linear
from baton.kernels.linear_cpu import fastest_linear, shared_linear
from baton.kernels.linear_split import GatheredLinear, ReducedLinear

_NOT_WEIGHTS = ("rotary_emb.inv_freq",)  # buffers that old checkpoints carry; the model computes its own


class CheckpointError(ValueError):
    """A file is missing, torn, or not what its config says. The message names the file or tensor."""


class WeightSource(Protocol):
    """Tensors under their Hugging Face names, whatever the file calls them."""

    def names(self) -> Set[str]: ...

    def read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...], dest: torch.Tensor) -> None:
        """Copy `tensor[part]` into `dest`, converting to its dtype and device. Raises unless the tensor has `shape`."""
        ...


def check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise CheckpointError(f"{name} has shape {list(found)}, but the model's config asks for {list(wanted)}")


class DummyWeights:
    """Random weights of any shape: a model of the right size that says nothing, for benchmarks."""

    def names(self) -> Set[str]:
        return frozenset()

    def read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...], dest: torch.Tensor) -> None:
        if name.endswith("norm.weight"):
            dest.fill_(1.0)
        else:
            dest.normal_(std=0.02)


@dataclass(frozen=True, slots=True)
class Shard:
    """Which share of each split dimension this rank holds."""

    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} is outside 0..{self.world - 1}")

    def split(self, size: int, what: str) -> int:
        if size % self.world:
            raise ValueError(f"{what} = {size} cannot be split over {self.world} ranks; use a divisor of {size}")
        return size // self.world

    def part(self, size: int, what: str) -> slice:
        share = self.split(size, what)
        return slice(self.rank * share, (self.rank + 1) * share)

    def uneven_part(self, size: int) -> slice:
        """Equal shares, rounded up; the last ranks have what is left."""
        share = -(-size // self.world)
        return slice(min(size, self.rank * share), min(size, (self.rank + 1) * share))


@dataclass(frozen=True, slots=True)
class Placement:
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    collective: Collective = field(default_factory=NoCollective)  # joins this rank's results with the others'


class Weights:
    def __init__(self, source: WeightSource, placement: Placement) -> None:
        self._source = source
        self._dtype = placement.dtype
        self.device = placement.device
        self._collective = placement.collective
        self.shard = Shard(placement.collective.rank, placement.collective.world)
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._source.names()

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor that every rank holds whole."""
        dest = torch.empty(shape, dtype=dtype or self._dtype, device=self.device)
        self._fill(name, shape, tuple(slice(0, size) for size in shape), dest)
        return dest

    def norm(self, name: str, size: int, offset: float) -> torch.Tensor:
        return self.tensor(f"{name}.weight", size).add_(offset)

    def merged_linear(self, out_sizes: Mapping[str, int], in_size: int, *, bias: bool = False) -> Linear:
        """One product for several projections of one input. Each rank holds its share of every projection's outputs."""
        parts = {name: self.shard.part(size, f"{name}'s outputs") for name, size in out_sizes.items()}
        total = sum(part.stop - part.start for part in parts.values())
        weight = self._empty(total, in_size)
        biases = self._empty(total) if bias else None
        start = 0
        for name, part in parts.items():
            rows = slice(start, start + part.stop - part.start)
            self._fill(f"{name}.weight", (out_sizes[name], in_size), (part, slice(0, in_size)), weight[rows])
            if biases is not None:
                self._fill(f"{name}.bias", (out_sizes[name],), (part,), biases[rows])
            start = rows.stop
        return fastest_linear(weight, biases)

    def reduced_linear(self, name: str, out_size: int, in_size: int, *, bias: bool = False) -> Linear:
        """Each rank holds its share of the inputs; the ranks' products add up to the result, rank 0's with the bias."""
        part = self.shard.part(in_size, f"{name}'s inputs")
        weight = self._empty(out_size, part.stop - part.start)
        self._fill(f"{name}.weight", (out_size, in_size), (slice(0, out_size), part), weight)
        added = self.tensor(f"{name}.bias", out_size) if bias else None
        return ReducedLinear(fastest_linear(weight, None if self.shard.rank else added), self._collective)

    def gathered_linear(self, name: str, out_size: int, in_size: int, *, tied: torch.Tensor | None = None) -> Linear:
        """Each rank computes its share of the outputs and gets them all. `tied`: the weight, if it is held already."""
        part = self.shard.uneven_part(out_size)
        if tied is not None:
            return GatheredLinear(shared_linear(tied[part]), self._collective, out_size)
        weight = self._empty(part.stop - part.start, in_size)
        self._fill(f"{name}.weight", (out_size, in_size), (part, slice(0, in_size)), weight)
        return GatheredLinear(fastest_linear(weight), self._collective, out_size)

    def check_all_read(self, *unused: str) -> None:
        """Refuse a checkpoint that holds more than the model uses: it would run, and say something else."""
        left = self._source.names() - self._read - set(unused)
        left = {name for name in left if not name.endswith(_NOT_WEIGHTS)}
        if left:
            some = ", ".join(sorted(left)[:5])
            raise CheckpointError(f"the checkpoint has {len(left)} tensors that this architecture does not use: {some}")

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self.device)

    def _fill(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...], dest: torch.Tensor) -> None:
        self._source.read(name, shape, part, dest)
        self._read.add(name)
