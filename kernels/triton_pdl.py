# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportOptionalMemberAccess=false
"""Programmatic dependent launch: on Hopper and later a kernel starts while the one before it still drains.

A kernel launched with `**pdl()` calls `start_next` first, reads what no kernel of the step writes (weights, indices),
and calls `wait_for_previous` before it touches anything else. Every program must wait: what it writes, an earlier
kernel may still be reading. CUDA graphs keep such launches. Elsewhere, and in the interpreter, both calls do nothing.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
import triton.language as tl

IS_INTERPRETED = triton.knobs.runtime.interpret
if not IS_INTERPRETED:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
else:

    def gdc_launch_dependents() -> None: ...

    def gdc_wait() -> None: ...


@cache
def pdl() -> dict[str, Any]:
    """Launch options and constexpr argument of a kernel that has the parameter PDL."""
    if IS_INTERPRETED:
        return {"PDL": False}
    target = triton.runtime.driver.active.get_current_target()
    has_pdl = target.backend == "cuda" and target.arch >= 90
    return {"PDL": True, "launch_pdl": True} if has_pdl else {"PDL": False}


@triton.jit
def start_next(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    if PDL:
        gdc_wait()
