"""configs/grafana_dashboard.json shows metrics that exist, with labels that they have, as
Prometheus means them.
"""

import json
import re

from datatrove_ckpt.generation.prometheus import PREFIX
from tests.metrics import exposition, metrics
from tests.pages import ROOT, pages

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


METRICS = dict(re.findall(r"^# TYPE (\S+) (\w+)$", exposition([metrics()]).decode(), re.MULTILINE))
"""The kind of each metric, by its name."""


def metric(name):
    """Of a series: a histogram has three."""
    return _PARTS.sub("", name) if name not in METRICS else name


def test_every_metric_of_the_dashboard_exists():
    shown = {name for expression in expressions() for name in _NAME.findall(expression)}
    assert {metric(name) for name in shown} <= set(METRICS)
    for name in shown:
        assert (METRICS[metric(name)] == "histogram") == bool(_PARTS.search(name)), name
    assert len(shown) > 15


def test_the_page_names_no_other_metric():
    named = set(re.findall(rf"\b{PREFIX}[a-z]\w+", pages()["docs/monitoring.md"]))
    assert {metric(name) for name in named} <= set(METRICS)
