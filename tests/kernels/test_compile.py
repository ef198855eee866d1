from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"


@pytest.mark.timeout(300)
def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    """The interpreter accepts what the compiler refuses (types, shapes of loop-carried values, shared memory)."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    program = Path(__file__).with_name("hopper_without_gpu.py")
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = set(re.findall(r"^compiled (\w+):", done.stdout, re.MULTILINE))
    launched = {
        name
        for file in KERNELS.glob("*_triton.py")
        for name in re.findall(r"^    +(?:return )?(_\w+)\[", file.read_text(), re.MULTILINE)
    }
    assert launched and launched <= compiled, launched - compiled
