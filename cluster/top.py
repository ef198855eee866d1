"""`baton top`: a gateway's status, live in the terminal."""

from __future__ import annotations

import httpx
import msgspec
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from baton.cluster.errors import RequestFailedError
from baton.router.status import GatewayStatus, WorkerStatus

BAR_WIDTH = 30


async def run_top(url: str, *, console: Console | None = None, num_updates: int | None = None) -> None:
    """Redraw with every update until interrupted, or for `num_updates`."""
    seen = 0
    with Live(console=console or Console(), auto_refresh=False, screen=num_updates is None) as live:
        async with httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(10, read=30)) as http:
            try:
                async with http.stream("GET", "/status/events") as reply:
                    reply.raise_for_status()
                    async for line in reply.aiter_lines():
                        if line.startswith("data: "):
                            status = msgspec.json.decode(line.removeprefix("data: "), type=GatewayStatus)
                            live.update(view(status), refresh=True)
                            seen += 1
                        if seen == num_updates:
                            return
            except httpx.HTTPError as error:
                raise RequestFailedError(f"{url}: {error or type(error).__name__}") from error


def view(status: GatewayStatus) -> RenderableType:
    hits = "-" if status.hit_rate is None else f"{status.hit_rate:.0%}"
    figures = {
        "goodput": f"{status.goodput_per_s:.1f} tokens/s",
        "output": f"{status.output_tokens_per_s:.1f} tokens/s",
        "requests": f"{status.requests_per_s:.1f}/s",
        "running, queued": f"{status.num_running:.0f}, {status.num_queued:.0f}",
        "TTFT p50, p99": f"{_ms(status.ttft_p50_s)}, {_ms(status.ttft_p99_s)}",
        "ITL p50, p99": f"{_ms(status.itl_p50_s)}, {_ms(status.itl_p99_s)}",
        "cache hits": hits,
        "migrations, refusals": f"{status.migrations:.0f}, {status.refusals:.0f}",
    }
    boxes = Columns([Panel(value, title=name, title_align="left", width=30) for name, value in figures.items()])
    table = Table(title=status.model, title_justify="left", expand=False)
    for column in ("worker", "role", "running", "waiting", "prompt tokens"):
        table.add_column(column, justify="left" if column in ("worker", "role") else "right")
    table.add_column("blocks: held █ cached ▒ free ·")
    for worker in status.workers:
        numbers = (worker.num_running, worker.num_waiting, worker.waiting_tokens)
        table.add_row(worker.name, worker.role, *map(str, numbers), _bar(worker))
    return Group(boxes, table)


def _bar(worker: WorkerStatus) -> Text:
    total = max(worker.blocks_held + worker.blocks_cached + worker.blocks_free, 1)
    held = round(BAR_WIDTH * worker.blocks_held / total)
    cached = min(round(BAR_WIDTH * worker.blocks_cached / total), BAR_WIDTH - held)
    return Text.assemble(("█" * held, "yellow"), ("▒" * cached, "blue"), "·" * (BAR_WIDTH - held - cached))


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.0f} ms"
