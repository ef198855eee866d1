# pyright: basic
"""Draw engine.py's mixed load: what prompts cost the sequences that decode beside them, by prompt tokens a step.

python tests/bench/plot_mixed.py tests/bench/results/engine-H200-card2-2026-11-30.json out.svg
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt
import typer


def main(figures: Path, picture: Path) -> None:
    found = json.loads(figures.read_text())
    mixed = {int(size): row for size, row in found["mixed"].items()}
    prefill_ms = next(row["measured"] for row in found["results"] if row["name"] == "prefill 8k")
    rates = [row["prompt_tokens_per_s"] / 1e3 for row in mixed.values()]
    quiet = next(iter(mixed.values()))["quiet_itl_ms"]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(rates, [row["itl_ms"] for row in mixed.values()], "o-", label="p50")
    axes.plot(rates, [row["p99_itl_ms"] for row in mixed.values()], "o--", label="p99")
    for size, rate, row in zip(mixed, rates, mixed.values(), strict=True):
        axes.annotate(f"{size}", (rate, row["p99_itl_ms"]), textcoords="offset points", xytext=(-4, 7), ha="right")
    axes.axhline(2 * quiet, color="grey", lw=0.8)
    axes.annotate("twice the gap without prompts", (rates[0], 2 * quiet), textcoords="offset points", xytext=(0, -11))
    axes.axvline(0.8 * 8.192 / prefill_ms * 1e3, color="grey", lw=0.8, ls=":", label="80 % of prefill alone")
    axes.set(yscale="log", xlabel="thousand prompt tokens a second", ylabel="ms between tokens of 64 sequences")
    axes.set_title("An 8k prompt every second; the labels are prompt tokens a step", fontsize=10)
    axes.legend()
    figure.savefig(picture)


if __name__ == "__main__":
    typer.run(main)
