"""How KV moves and how long silence is borne; composed into the cluster's config. Knows no defaults of others."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MoverKind = Literal["auto", "nixl", "nccl", "local"]


class TransferConfig(BaseModel):
    """Each bound must outlast a few lost beats, or a busy second would look like a death."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mover: MoverKind = "auto"  # NIXL where it starts, else nccl, which is gloo between CPUs; local joins one process
    beat_s: float = Field(default=1.0, gt=0)  # how often each side of a stream shows that it lives
    lease_s: float = Field(default=10.0, gt=0)  # prefill keeps blocks this long after the last sign of decode
    stall_s: float = Field(default=10.0, gt=0)  # decode fails an attempt over after this long without a sign of prefill
    # Decode gives up an attempt that finds no room for so long. Each holds the prefix that it found in decode's cache:
    # several that wait for each other's would wait for ever.
    hold_s: float = Field(default=30.0, gt=0)
    verify: bool = False  # prove by fingerprints, computed on the device, that what arrived is what was sent
    # Ask prefill for KV in FP8: half the bytes of 16-bit KV, for slow links. It is lossy: an error of up to 1/16 in
    # every value, 2.6 % in the root mean square.
    compress: bool = False
    max_write_blocks: int = Field(default=64, gt=0)  # a larger push is split, so that progress shows

    @model_validator(mode="after")
    def _bounds_outlast_beats(self) -> Self:
        for name, bound_s in (("lease_s", self.lease_s), ("stall_s", self.stall_s)):
            if bound_s < 3 * self.beat_s:
                raise ValueError(f"{name} = {bound_s} must be at least 3 * beat_s = {3 * self.beat_s}; raise {name}")
        return self
