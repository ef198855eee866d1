"""Makes deploy/grafana: one JSON file per dashboard, and the table of panels. Run as a module to write them.

Needs grafana-foundation-sdk, which is among the packages for development.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders.common import StackingConfig, VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, StackingMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, GridPos

from baton.cluster.panel import Panel
from baton.cluster.panels import DASHBOARDS

FOLDER = Path(__file__).parents[1] / "deploy" / "grafana"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH, HEIGHT = 12, 8  # of Grafana's grid, which is 24 wide


def file_name(title: str) -> str:
    return title.lower().replace(" ", "-") + ".json"


def rendered() -> dict[str, str]:
    """Return every file's text by its name."""
    files = {file_name(title): _encoded(_dashboard(title, panels)) for title, panels in DASHBOARDS.items()}
    return files | {"README.md": _table()}


def _dashboard(title: str, panels: Sequence[Panel]) -> Any:
    source = DatasourceVariable("datasource").label("Data source").type("prometheus")
    board = Dashboard(f"Baton: {title}").uid(f"baton-{file_name(title).removesuffix('.json')}").tags(["baton"])
    board = board.refresh("10s").time("now-1h", "now").with_variable(source)
    for index, panel in enumerate(panels):
        place = GridPos(h=HEIGHT, w=WIDTH, x=index % 2 * WIDTH, y=index // 2 * HEIGHT)
        board = board.with_panel(_panel(panel).grid_pos(place).id(index + 1))
    return board.build()


def _panel(panel: Panel) -> TimeSeries:
    legend = VizLegendOptions().show_legend(True).display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    series = TimeSeries().title(panel.title).description(panel.means).unit(panel.unit).datasource(SOURCE).min(0)
    series = series.legend(legend.calcs([])).fill_opacity(25 if panel.stacked else 0)
    if panel.stacked:
        series = series.stacking(StackingConfig().mode(StackingMode.NORMAL))
    for letter, query in zip("ABCDEFGH", panel.queries, strict=False):
        series = series.with_target(Dataquery().expr(query.expr).legend_format(query.legend).ref_id(letter))
    return series


def _encoded(dashboard: Any) -> str:
    # The encoder leaves a random id in variables that have none.
    tree = json.loads(JSONEncoder(sort_keys=True).encode(dashboard))
    for variable in tree["templating"]["list"]:
        variable.pop("id", None)
    return json.dumps(tree, indent=1, sort_keys=True) + "\n"


def _table() -> str:
    lines = [
        "# Dashboards",
        "",
        "Made by `python -m baton.cluster.dashboards` out of `cluster/panels.py`. Import the JSON files into Grafana,",
        "or let it provision them from this folder; each has a variable for the Prometheus data source.",
    ]
    for title, panels in DASHBOARDS.items():
        lines += ["", f"## {title}", "", "| panel | shows | queries |", "| --- | --- | --- |"]
        for panel in panels:
            queries = "<br>".join(f"`{query.expr}`".replace("|", "\\|") for query in panel.queries)
            lines.append(f"| {panel.title} | {panel.means} | {queries} |")
    return "\n".join(lines) + "\n"


def write(folder: Path = FOLDER) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in rendered().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    write()
