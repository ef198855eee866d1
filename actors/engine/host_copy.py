# pyright: reportUnknownMemberType=false
"""Results on their way from the device to whoever waits for the step."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HostCopy:
    """Tensors on their way to the host. On CUDA the copies are queued behind the work that fills them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if not tensors[0].is_cuda:
            self._tensors = list(tensors)
            return
        self._tensors = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for host, device in zip(self._tensors, tensors, strict=True):
            host.copy_(device, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def wait(self) -> list[torch.Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._tensors
