"""The eye test as a script: sizes of functions and files, and a failure where one is too long to be read at a glance.

Functions are measured from `def` to their last line. Triton kernels are exempt; test files may be of any length.
"""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 400


@dataclass(frozen=True, slots=True)
class Size:
    name: str
    num_lines: int


def is_triton_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def function_sizes(name: str, source: str) -> list[Size]:
    """Measure every function of one file, nested ones and methods too."""
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [
        Size(f"{name}:{node.lineno} {node.name}", (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in functions
        if not is_triton_kernel(node)
    ]


def file_size(name: str, source: str) -> Size:
    return Size(name, len(source.splitlines()))


def too_long(functions: Sequence[Size], files: Sequence[Size]) -> list[Size]:
    return [size for size in functions if size.num_lines > MAX_FUNCTION_LINES] + [
        size for size in files if size.num_lines > MAX_FILE_LINES and not size.name.startswith("tests/")
    ]


def percentile(sizes: Sequence[Size], share: float) -> int:
    ordered = sorted(size.num_lines for size in sizes)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def table(functions: Sequence[Size], files: Sequence[Size]) -> str:
    rows = [f"{'':<10}{'count':>7}{'lines':>8}{'median':>8}{'p90':>6}{'longest':>9}"]
    for label, sizes in (("functions", functions), ("files", files)):
        longest = max(sizes, key=lambda size: size.num_lines)
        total = sum(size.num_lines for size in sizes)
        median = round(statistics.median(size.num_lines for size in sizes))
        rows.append(
            f"{label:<10}{len(sizes):>7}{total:>8}{median:>8}{percentile(sizes, 0.9):>6}{longest.num_lines:>9}"
            f"  {longest.name}"
        )
    return "\n".join(rows)


def main() -> int:
    tracked = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout.split()
    sources = {name: Path(name).read_text() for name in tracked if Path(name).exists()}
    functions = [size for name, source in sources.items() for size in function_sizes(name, source)]
    files = [file_size(name, source) for name, source in sources.items()]
    print(table(functions, files))
    print(f"limits: functions {MAX_FUNCTION_LINES}, files {MAX_FILE_LINES}")
    offenders = too_long(functions, files)
    for size in offenders:
        print(f"too long: {size.name}: {size.num_lines} lines")
    return 1 if offenders else 0


if __name__ == "__main__":
    sys.exit(main())
