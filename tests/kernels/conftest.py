"""Every kernel test runs on each device this machine has; where there is no GPU, Triton runs in its interpreter.

`-m gpu` selects the compiled runs. The interpreter must be chosen before triton is imported anywhere.
"""

from __future__ import annotations

import os

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()

if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
