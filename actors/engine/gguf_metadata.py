"""A GGUF file's metadata, without its tensors and without torch.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. (The gguf package's reader takes seconds over
the arrays of a vocabulary, and transformers' imports torch.)
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_VERSIONS = (2, 3)


class NotGGUF(Exception):
    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}; give a GGUF file of version 2 or 3")


def read_metadata(path: Path) -> dict[str, Any]:
    """Return every key's value; arrays are lists or tuples. Raises NotGGUF."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            magic, version, _, num_values = struct.unpack_from("<4sIQQ", data, 0)
            if magic != b"GGUF" or version not in _VERSIONS:
                raise NotGGUF(path, f"it starts with {magic!r}, version {version}")
            reader = _Reader(data, start=24)
            return {reader.string(): reader.value(reader.scalar("I")) for _ in range(num_values)}
        except (struct.error, KeyError, UnicodeDecodeError) as error:
            raise NotGGUF(path, f"its metadata is damaged: {error}") from error


class _Reader:
    def __init__(self, data: mmap.mmap, start: int) -> None:
        self._data = data
        self._offset = start

    def scalar(self, kind: str) -> Any:
        return self._unpack(f"<{kind}")[0]

    def string(self) -> str:
        length: int = self.scalar("Q")
        start, self._offset = self._offset, self._offset + length
        return self._data[start : self._offset].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        of, length = self._unpack("<IQ")
        if of in _SCALARS:
            return self._unpack(f"<{length}{_SCALARS[of]}")
        return [self.value(of) for _ in range(length)]

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._offset)
        self._offset += struct.calcsize(layout)
        return values
