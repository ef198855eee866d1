from __future__ import annotations

import os
import subprocess
import sys

from baton.actors.engine.block_hash import block_hashes, child_hash, root_hash

PROGRAM = """
from baton.actors.engine.block_hash import block_hashes, root_hash
for fields in [("",), ("salt", "adapter")]:
    print([hash.hex() for hash in block_hashes(range(100), 16, root_hash(*fields))])
"""


def test_hashes_are_equal_in_processes_with_different_hash_seeds() -> None:
    """Entry 21: hashes built on Python's `hash()` differ between processes, so decode never finds prefill's blocks."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "random")
    }
    here = [
        [hash.hex() for hash in block_hashes(range(100), 16, root_hash(*fields))]
        for fields in [("",), ("salt", "adapter")]
    ]
    assert outputs == {"\n".join(map(str, here)) + "\n"}


def test_fields_of_the_root_cannot_run_into_each_other() -> None:
    assert len({root_hash("ab", "c"), root_hash("a", "bc"), root_hash("abc")}) == 3


def test_hashing_block_by_block_equals_hashing_at_once() -> None:
    root = root_hash("salt")
    hashes = block_hashes(range(50), 16, root)
    assert len(hashes) == 3  # the partial tail has none
    assert hashes[1] == child_hash(child_hash(root, range(16)), range(16, 32))
