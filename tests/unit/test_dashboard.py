"""configs/grafana_dashboard.json shows metrics that exist, with labels that they have, as
Prometheus means them.
"""

import json
import re

from datatrove_ckpt.generation.prometheus import PREFIX
from tests.pages import ROOT, pages, section, table_rows
from tests.unit.test_metrics import METRICS

DASHBOARD = json.loads((ROOT / "configs/grafana_dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
_NAME = re.compile(rf"\b{PREFIX}\w+")
_PARTS = re.compile("_(bucket|sum|count)$")


def expressions():
    shown = [target["expr"] for panel in PANELS for target in panel["targets"]]
    variables = [
        one["definition"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"
    ]
    return shown + variables + [one["expr"] for one in DASHBOARD["annotations"]["list"]]


def metric(name):
    """Of a series: a histogram has three."""
    return _PARTS.sub("", name) if name not in METRICS else name


def kind(metric):
    return metric.kind("name", "help").type


def test_every_metric_of_the_dashboard_exists():
    shown = {name for expression in expressions() for name in _NAME.findall(expression)}
    assert {metric(name) for name in shown} <= set(METRICS)
    for name in shown:
        assert (kind(METRICS[metric(name)]) == "histogram") == bool(_PARTS.search(name)), name
    assert len(shown) > 15


def test_the_page_lists_every_metric_as_it_is_and_names_no_other():
    kinds = {"this attempt": "counter", "histograms": "histogram"}
    shown = {}
    for about, metrics in table_rows(section("docs/monitoring.md", "### The metrics")):
        for name, labels in re.findall(r"`(\w+)`(?: \(([^)]*)\))?", metrics):
            shown[PREFIX + name] = (kinds.get(about, "gauge"), tuple(re.findall(r"\w+", labels)))
    assert shown == {name: (kind(one), one.labels) for name, one in METRICS.items()}
    named = set(re.findall(rf"\b{PREFIX}[a-z]\w+", pages()["docs/monitoring.md"]))
    assert {metric(name) for name in named} <= set(METRICS)
