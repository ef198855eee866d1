"""Which errors say that a device is broken, and not the program that used it."""

from __future__ import annotations

import re

# As CUDA's runtime and torch word them; NVIDIA's "Xid" names the same in kernel logs. An illegal access or a failed
# assertion is not among them: those are mostly the work of a kernel, or of a request.
_FAULTS = re.compile(
    r"uncorrectable (ECC|NVLink) error|hardware stack error|fallen off the bus|GPU is lost|\bXid\b"
    r"|CUDA-capable device\(s\) is/are busy or unavailable|system not yet initialized|no CUDA-capable device"
    r"|unspecified launch failure|CUDA error: unknown error|misaligned address|illegal instruction",
    re.IGNORECASE,
)


def is_device_fault(text: str) -> bool:
    return _FAULTS.search(text) is not None
