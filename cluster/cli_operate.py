"""The commands for a cluster on a running Ray: what an operator types."""

from __future__ import annotations

import asyncio
import json as jsonlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from baton.actors.messages import Role
from baton.cluster.errors import ClusterError

if TYPE_CHECKING:
    from baton.cluster.controller import ClusterStatus
    from baton.cluster.operate import Operator

Name = Annotated[str, typer.Option("--name", help="The cluster's name, as in its configuration.")]
Address = Annotated[str, typer.Option("--address", help="Ray's address; auto finds the one on this machine.")]
Wait = Annotated[bool, typer.Option(help="Return when everything is as wanted.")]
Timeout = Annotated[float, typer.Option(min=1, help="How long to wait, in seconds.")]

messages = Console(stderr=True, highlight=False)


def register(app: typer.Typer) -> None:
    for command in (up, down, status, scale, drain, restart, switch, release, plan, logs, profile, top):
        app.command()(command)


def up(
    path: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file; deploy/ has examples.")],
    address: Annotated[str | None, typer.Option(help="Ray's address; else the configuration's.")] = None,
    wait: Wait = True,
) -> None:
    """Bring the cluster of CONFIG up on a running Ray, or give the one that is up a new configuration."""
    from baton.cluster.config import load_config
    from baton.cluster.operate import Operator, for_running_ray, join

    config = for_running_ray(load_config(path))
    join(address or config.ray.address)
    operator = Operator(config.name)

    async def bring_up() -> None:
        is_new = await operator.up(config)
        if wait:
            try:
                result = await _until_settled(operator, config.ray.start_timeout_s)
            except ClusterError:
                if is_new:
                    await operator.down()  # nothing half done is left; one that was up goes on trying
                raise
            messages.print(f"[bold green]up[/bold green] {result.model} at {', '.join(result.gateways)}")

    asyncio.run(bring_up())


def down(name: Name = "baton", address: Address = "auto") -> None:
    """Take the cluster down: running requests may end, then nothing of it is left in Ray."""
    _operate(name, address, lambda operator: operator.down())
    messages.print("down")


def status(
    name: Name = "baton",
    address: Address = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show every process, and whether all is as wanted; exit with 1 if it is not."""
    import msgspec

    result: ClusterStatus = _operate(name, address, lambda operator: operator.status())
    if json:
        typer.echo(jsonlib.dumps(msgspec.to_builtins(result)))
    else:
        Console(highlight=False).print(_table(result))
        for bad in result.quarantine:
            messages.print(
                f"quarantine: {bad.name} on {bad.place.host}, left by {bad.worker_id}: {bad.why}", markup=False
            )
    if not result.is_settled:
        raise typer.Exit(1)


def scale(
    pools: Annotated[list[str], typer.Argument(metavar="ROLE=N...", help="For example prefill=1 decode=3.")],
    name: Name = "baton",
    address: Address = "auto",
    wait: Wait = True,
    timeout: Timeout = 600.0,
) -> None:
    """Change how many workers a pool has; those that go are drained first."""
    wanted = [_parse_pool(pool) for pool in pools]

    async def run(operator: Operator) -> None:
        for role, replicas in wanted:
            await operator.scale(role, replicas)

    _change(name, address, run, wait, timeout)


def drain(
    worker: Annotated[str, typer.Argument(help="Its name, as 'baton status' shows it.")],
    name: Name = "baton",
    address: Address = "auto",
    wait: Wait = True,
    timeout: Timeout = 600.0,
) -> None:
    """Take one worker away without losing a request; its pool is smaller by one from then on."""
    _change(name, address, lambda operator: operator.drain(worker), wait, timeout)


def restart(
    workers: Annotated[list[str] | None, typer.Argument(help="Their names; without any, all workers.")] = None,
    name: Name = "baton",
    address: Address = "auto",
    wait: Wait = True,
    timeout: Timeout = 3600.0,
) -> None:
    """Start workers anew, one after the other, without losing a request."""
    _change(name, address, lambda operator: operator.restart(workers or []), wait, timeout)


def switch(
    worker: Annotated[str, typer.Argument(help="Its name, as 'baton status' shows it.")],
    role: Annotated[str, typer.Argument(help="prefill, decode or both.")],
    name: Name = "baton",
    address: Address = "auto",
) -> None:
    """Give a running worker another role. Nothing is loaded again, and what runs on it goes on."""
    _change(name, address, lambda operator: operator.switch_role(worker, _role(role)), True, 60.0)


def release(
    place: Annotated[str, typer.Argument(help="As 'baton status' shows it.")],
    name: Name = "baton",
    address: Address = "auto",
) -> None:
    """Let workers run again where a GPU or node was put into quarantine, once it is mended."""
    _operate(name, address, lambda operator: operator.release(place))


def plan(name: Name = "baton", address: Address = "auto") -> None:
    """Show how many workers the planner would let prefill and decode, and why."""
    from baton.cluster.planning import Plan

    result: Plan = _operate(name, address, lambda operator: operator.plan())
    title = f"planner ({result.mode}): now {_split(result.now)}"
    if result.decision is None:
        messages.print(f"{title}; {result.idle}")
        return
    decision = result.decision
    table = Table(title=f"{title}; best {_split(decision.split)}; the load needs {_split(decision.wanted)}")
    for column in ("what", "value", "unit", "because"):
        table.add_column(column)
    for reason in decision.reasons:
        table.add_row(reason.what, f"{reason.value:.3g}", reason.unit, reason.because)
    Console(highlight=False).print(table)


def _split(split: Sequence[int]) -> str:
    return f"{split[0]} prefill + {split[1]} decode"


def logs(
    process: Annotated[str, typer.Argument(help="A worker, gateway-N or controller.")],
    name: Name = "baton",
    address: Address = "auto",
    lines: Annotated[int, typer.Option("-n", help="How many of the last lines.")] = 200,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written from now on.")] = False,
) -> None:
    """Show what a process has logged, wherever it runs. Needs Ray's dashboard, which 'ray start --head' starts."""
    from baton.cluster.operate import Operator, join

    join(address)
    for piece in Operator(name).logs(process, num_lines=lines, follow=follow):
        typer.echo(piece, nl=False)


def profile(
    worker: Annotated[str, typer.Argument(help="Its name, as 'baton status' shows it.")],
    seconds: Annotated[float, typer.Option(min=0.1, max=60, help="How long to record.")] = 3.0,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The file to write.")] = None,
    name: Name = "baton",
    address: Address = "auto",
) -> None:
    """Record what a worker's engine does; chrome://tracing and Perfetto read the file."""
    trace: bytes = _operate(name, address, lambda operator: operator.profile(worker, seconds))
    path = output or Path(f"{worker}.trace.json.gz")
    path.write_bytes(trace)
    messages.print(f"{path} ({len(trace) / 1e6:.1f} MB)")


def top(url: Annotated[str, typer.Option(help="Where a gateway listens.")] = "http://127.0.0.1:8000") -> None:
    """Show goodput, latencies and every worker's load, live."""
    from baton.cluster.top import run_top

    asyncio.run(run_top(url))


def _change(
    name: str, address: str, change: Callable[[Operator], Awaitable[None]], wait: bool, timeout_s: float
) -> None:
    async def run(operator: Operator) -> None:
        await change(operator)
        if wait:
            await _until_settled(operator, timeout_s)

    _operate(name, address, run)


def _operate(name: str, address: str, work: Callable[[Operator], Awaitable[Any]]) -> Any:
    from baton.cluster.operate import Operator, join

    join(address)

    async def run() -> Any:
        return await work(Operator(name))

    return asyncio.run(run())


async def _until_settled(operator: Operator, timeout_s: float) -> ClusterStatus:
    with messages.status("waiting") as progress:

        def show(status: ClusterStatus) -> None:
            progress.update("  ".join(f"{p.name} [bold]{p.state}[/bold]" for p in status.processes))

        return await operator.until_settled(timeout_s, show)


def _parse_pool(text: str) -> tuple[Role, int]:
    role, equals, number = text.partition("=")
    if not equals or not number.isdecimal():
        raise typer.BadParameter(f"{text!r}: write ROLE=N, for example decode=3")
    return _role(role), int(number)


def _role(text: str) -> Role:
    roles: dict[str, Role] = {"prefill": "prefill", "decode": "decode", "both": "both"}
    if text not in roles:
        raise typer.BadParameter(f"{text!r} is no role: take prefill, decode or both")
    return roles[text]


def _table(result: ClusterStatus) -> Table:
    wanted = ", ".join(f"{count} {role}" for role, count in result.desired.items())
    title = f"{result.name}: {result.model}, wanted {wanted}; {'settled' if result.is_settled else 'not settled'}"
    table = Table(title=title, caption=f"controller at http://{result.controller}")
    for column in ("process", "role", "state", "address", "pid", "restarts", "failure"):
        table.add_column(column)
    for p in result.processes:
        cells = (p.name, p.role, p.state, p.address, p.pid, p.num_restarts, p.failure)
        table.add_row(*("" if cell is None else str(cell)[:80] for cell in cells))
    return table
