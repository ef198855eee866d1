"""The `baton` command. Commands import what they need when they run: `baton --help` needs neither Ray nor torch."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from baton.actors.engine.model_reference import ModelNotFoundError
from baton.cluster import cli_operate
from baton.cluster.bench.command import BenchOptions, bench
from baton.cluster.cli_options import takes
from baton.cluster.errors import ClusterError
from baton.cluster.sim.command import SimOptions, sim
from baton.cluster.train_drafter import TrainOptions, train_drafter

# What a shell reports for a command that the signal ended.
INTERRUPTED, TERMINATED = 130, 143


class BatonCommands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Show what an operator can act on as text; whatever else is raised is a defect, and keeps its traceback."""
        try:
            return super().invoke(ctx)
        except (ClusterError, ModelNotFoundError) as error:
            Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False)
            raise typer.Exit(1) from error
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(INTERRUPTED) from interrupt
        except asyncio.CancelledError as cancelled:
            raise typer.Exit(TERMINATED) from cancelled


app = typer.Typer(
    cls=BatonCommands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve large language models with prefill and decode on separate workers.",
)

cli_operate.register(app)

MaxTokens = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]


@app.command()
def demo(
    prompt: Annotated[
        str | None, typer.Option(help="Ask this and exit; without it, a terminal goes on as a chat.")
    ] = None,
    max_tokens: MaxTokens = 128,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object; all else goes to stderr.")] = False,
) -> None:
    """Start one prefill and one decode worker with a small model on this machine, and ask them something."""
    from baton.cluster.demo import demo as run

    asyncio.run(run(prompt, max_tokens=max_tokens, as_json=json))


@app.command()
def serve(path: Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file; deploy/ has examples.")]) -> None:
    """Bring up the cluster that CONFIG describes and serve until SIGINT or SIGTERM."""
    from baton.cluster.config import load_config
    from baton.cluster.ray_launcher import RayLauncher
    from baton.cluster.serve import serve as run

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config = load_config(path)
    asyncio.run(run(config, RayLauncher(config, log_to_driver=True)))


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Where the server listens.")] = "http://127.0.0.1:8000",
    max_tokens: MaxTokens = 512,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 always takes the likeliest token.")] = 0.7,
) -> None:
    """Chat with a running server."""
    from baton.cluster.chat import run_chat

    asyncio.run(run_chat(url, max_tokens=max_tokens, temperature=temperature))


@app.command()
def doctor() -> None:
    """Show what this machine has, what is missing or slow, and the fix; exit with 1 if something is missing."""
    from baton.cluster.doctor import as_table, examine

    findings = examine()
    Console().print(as_table(findings))
    if any(finding.verdict == "missing" for finding in findings):
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print Baton's version."""
    from baton.router.routes import baton_version

    typer.echo(baton_version())


app.command()(takes(BenchOptions, bench))
app.command()(takes(SimOptions, sim))
app.command()(takes(TrainOptions, train_drafter))


def main() -> None:
    app()
