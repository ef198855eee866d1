"""What the acceptance scripts share: commands, a client, and who is still there afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
ENV = os.environ | {
    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}
BATON = [sys.executable, "-c", "from baton.cluster.cli import main; main()"]


def run(command: Sequence[str | Path], *, timeout_s: float = 300, check: bool = True) -> str:
    """Run a command with its output shown and returned."""
    shown = " ".join(map(str, command)).replace(" ".join(BATON), "baton")
    print(f"$ {shown}", flush=True)
    done = subprocess.run(
        [*map(str, command)], env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, check=False
    )
    text = done.stdout.decode(errors="replace")
    print("\n".join(text.splitlines()[-12:]), flush=True)
    if check and done.returncode:
        raise SystemExit(f"{shown} exited with {done.returncode}:\n{text}")
    return text


def baton(*arguments: str | Path, check: bool = True, timeout_s: float = 300) -> str:
    return run([*BATON, *arguments], check=check, timeout_s=timeout_s)


def ask(address: str, prompt: str = "What is the capital of France?", **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": prompt}], "temperature": 0, "max_tokens": 16} | fields
    with httpx.Client(base_url=address, timeout=60) as http:
        body["model"] = http.get("/v1/models").json()["data"][0]["id"]
        return http.post("/v1/chat/completions", json=body).raise_for_status().json()


def wait_until(
    condition: Callable[[], bool], timeout_s: float, what: str, describe: Callable[[], object] = lambda: ""
) -> float:
    """Return how long it took. Raises SystemExit when it takes longer than `timeout_s`."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > timeout_s:
            raise SystemExit(f"not within {timeout_s:g} s: {what} {describe()}")
        time.sleep(0.05)
    return time.monotonic() - started


class Leftovers:
    """Processes of Ray and Baton, and shared memory, that were not there at the start."""

    def __init__(self) -> None:
        self._before = self._processes().keys() | self._memory()

    def now(self) -> list[str]:
        processes = {pid: name for pid, name in self._processes().items() if pid not in self._before}
        return [f"{name} ({pid})" for pid, name in processes.items()] + sorted(self._memory() - self._before)

    @staticmethod
    def _processes() -> dict[str, str]:
        found: dict[str, str] = {}
        for process in psutil.process_iter(["pid", "cmdline", "status"]):
            line = " ".join(process.info["cmdline"] or ())
            is_ours = "ray::" in line or "/ray/" in line or "baton" in line
            if is_ours and process.info["status"] != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                found[str(process.pid)] = line[:90]
        return found

    @staticmethod
    def _memory() -> set[str]:
        return {str(path) for path in Path("/dev/shm").iterdir()}
