# pyright: basic, reportArgumentType=false, reportCallIssue=false
"""`tensor_range`: the range of a loop in a Triton kernel whose bounds are tensors.

Compiled, it is `tl.range`. Triton 3.6's interpreter would give Python's range one-element arrays, which numpy 2.4 no
longer takes for integers; there the bounds are read out first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl

if TYPE_CHECKING:
    tensor_range = range
elif not triton.knobs.runtime.interpret:
    tensor_range = tl.range
else:

    def tensor_range(*bounds: Any) -> range:
        return range(*(bound if isinstance(bound, int) else int(bound.handle.data.item()) for bound in bounds))
