"""Draws the dashboard's panels from a Prometheus with matplotlib, where no Grafana is at hand.

python deploy/grafana/draw.py http://127.0.0.1:9090 dashboard.png [minutes]
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot  # noqa: E402
from matplotlib.ticker import EngFormatter, PercentFormatter  # noqa: E402

DASHBOARD = Path(__file__).with_name("dashboards") / "vllm-kvmerge.json"
COLUMNS, COLUMN_WIDTH = 3, 8
STEPS = 240


def series(url: str, query: str, start: float, end: float) -> list[dict[str, Any]]:
    """What a panel's query gives from ``start`` to ``end``, in seconds; all jobs and servers, rates over 20 s."""
    filled = query.replace("$__rate_interval", "20s").replace("$job", ".*").replace("$instance", ".*")
    step = max(1.0, (end - start) / STEPS)
    params: dict[str, Any] = {"query": filled, "start": start, "end": end, "step": step}
    answer = httpx.get(f"{url}/api/v1/query_range", params=params, timeout=30).json()
    if answer["status"] != "success":
        raise ValueError(f"{query}: {answer}")
    return answer["data"]["result"]


def draw(url: str, output: Path, minutes: float) -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = sorted({panel["gridPos"]["y"] for panel in panels if panel["type"] != "row"})
    figure, axes = pyplot.subplots(len(places), COLUMNS, figsize=(15, 2.6 * len(places)), squeeze=False)
    end = time.time()
    for panel in panels:
        if panel["type"] == "row":
            continue
        place = panel["gridPos"]
        axis = axes[places.index(place["y"])][place["x"] // COLUMN_WIDTH]
        unit = panel["fieldConfig"]["defaults"]["unit"]
        axis.set_title(panel["title"], fontsize=9, loc="left")
        axis.yaxis.set_major_formatter(PercentFormatter(1.0) if unit == "percentunit" else EngFormatter())
        for target in panel["targets"]:
            for one in series(url, target["expr"], end - 60 * minutes, end):
                name = target["legendFormat"]
                for label, value in one["metric"].items():
                    name = name.replace(f"{{{{{label}}}}}", value)
                seconds = [float(moment) - end for moment, _ in one["values"]]
                axis.plot(seconds, [float(value) for _, value in one["values"]], linewidth=1, label=name)
        axis.set_ylim(bottom=0, top=1.05 if panel["fieldConfig"]["defaults"].get("max") == 1 else None)
        axis.tick_params(labelsize=7)
        if axis.lines:
            axis.legend(fontsize=6, loc="upper left")
    for axis in axes[-1]:
        axis.set_xlabel("seconds", fontsize=8)
    figure.tight_layout()
    figure.savefig(output, dpi=90)


if __name__ == "__main__":
    draw(sys.argv[1].rstrip("/"), Path(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 30)
