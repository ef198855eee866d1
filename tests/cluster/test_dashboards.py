"""The committed dashboards and rules: as generated, and about series that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from baton.actors.ceilings import Ceilings
from baton.actors.engine.speculation import DraftCounts
from baton.actors.engine.updates import BlockCounts
from baton.actors.messages import KVEvents
from baton.actors.metrics import WorkerMetrics
from baton.actors.step_loop import StepReport
from baton.cluster.controller_metrics import ControllerMetrics
from baton.cluster.dashboards import FOLDER, rendered
from baton.cluster.panels import DASHBOARDS
from baton.router.metrics import Metrics
from tests.cluster.cluster_fakes import worker_info

ROOT = Path(__file__).parents[2]
RULES: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())
GRAFANAS = {"$__rate_interval": "1m"}


def rules(kind: str) -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"] if kind in rule]


def expressions() -> list[str]:
    """Every query of every panel, alert and rule."""
    queries = [query.expr for panels in DASHBOARDS.values() for panel in panels for query in panel.queries]
    return queries + [rule["expr"] for kind in ("record", "alert") for rule in rules(kind)]


def exported() -> dict[str, set[str]]:
    """Name every series there can be, with its labels."""
    worker = WorkerMetrics("w")
    counts = BlockCounts(total=1, free=1, cached=0, held=0)
    worker.on_report(StepReport((), KVEvents(), counts, 0, 0, 0, 0.0, 0.0, None, 0.0))
    worker.watch(worker.state.work, Ceilings(1.0, 1.0), lambda: worker_info("w"), {"decode": ()}, DraftCounts([1], [1]))
    gateway = Metrics()
    gateway.watch_queue(lambda: 0, lambda: 0)
    series: dict[str, set[str]] = {"up": {"job", "process", "kind"}}
    for registry in (worker.registry, gateway.registry, ControllerMetrics().registry):
        series |= {name: labels | {"process", "kind"} for name, labels in series_of(registry).items()}
    return series | {rule["record"]: {"slo"} for rule in rules("record")}


def series_of(registry: CollectorRegistry) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for family in registry.collect():
        endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        labels = set(getattr(family, "_labelnames", ())) | {key for s in family.samples for key in s.labels}
        found |= {family.name + ending: labels for ending in endings}
    return found


def test_the_committed_files_are_what_the_generator_makes() -> None:
    """`python -m baton.cluster.dashboards` writes them."""
    assert {path.name: path.read_text() for path in FOLDER.iterdir()} == rendered()


def test_panels_lie_side_by_side_and_have_ids_of_their_own() -> None:
    for name, text in rendered().items():
        if name.endswith(".json"):
            panels = json.loads(text)["panels"]
            places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
            assert len(places) == len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.parametrize("expression", expressions())
def test_an_expression_is_about_series_that_are_exported(expression: str) -> None:
    names = set(re.findall(r"\b(?:baton_\w+|slo:[\w:]+|up)\b", expression))
    assert names and names <= exported().keys()


def test_the_operators_guide_explains_every_series() -> None:
    guide = (ROOT / "deploy" / "README.md").read_text()
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported() if name.startswith("baton_")}
    assert {name for name in families if f"`{name}`" not in guide} == set()


def test_every_alert_tells_what_to_do() -> None:
    for rule in rules("alert"):
        assert rule["annotations"]["summary"] and len(rule["annotations"]["runbook"]) > 40
        assert rule["labels"]["severity"] in {"page", "ticket"}


def test_label_sets_stay_small() -> None:
    """Entry 27: no label's values come from requests."""
    closed = {
        "worker", "process", "kind", "state", "phase", "role", "side", "version", "mover",
        "endpoint", "status", "reason", "finish", "slo", "outcome", "le", "job", "key", "path", "place",
    }  # fmt: skip
    assert set().union(*exported().values()) <= closed
