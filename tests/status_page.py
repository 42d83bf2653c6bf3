"""Writes the tables of docs/status.md from the schema of ``status --json``: python -m tests.status_page"""

from __future__ import annotations

import json
from typing import Any

from datatrove_ckpt.maintenance.run_state import SCHEMA
from tests.pages import ROOT

PAGE = ROOT / "docs/status.md"
START = "<!-- The rest is written by python -m tests.status_page. -->\n"
_TITLES = {
    "totals": "`totals` and `retried`",
    "rank": "Each of `ranks`",
    "attempt": "`attempt`",
    "counts": "`committed` and `unfinished`",
    "work": "`work`",
    "rates": "`rates` and `average`",
}


def page() -> str:
    """The page with tables as the schema gives them."""
    schema = json.loads(SCHEMA.read_bytes())
    parts = [PAGE.read_text().partition(START)[0] + START, _table(schema)]
    for name, title in _TITLES.items():
        parts.append(f"### {title}\n\n{schema['$defs'][name]['description']}\n\n{_table(schema['$defs'][name])}")
    return "\n".join(parts)


def _table(node: dict[str, Any]) -> str:
    rows = [f"| `{name}` | {_type(value)} | {_meaning(value)} |" for name, value in node["properties"].items()]
    return "\n".join(["| key | type | meaning |", "|---|---|---|", *rows, ""])


def _type(node: dict[str, Any]) -> str:
    if "anyOf" in node:
        return " or ".join(_type(one) for one in node["anyOf"])
    if "enum" in node:
        return "text" if all(isinstance(one, str) for one in node["enum"]) else "text or null"
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        return "text" if name in ("state", "trouble") else "object"
    kinds = node.get("type", "integer")
    words = {"string": "text", "array": "list", "boolean": "true or false", "integer": "count"}
    return " or ".join(words.get(kind, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds))


def _meaning(node: dict[str, Any]) -> str:
    inner = [f"`{name}`: {_meaning(value)}" for name, value in node.get("properties", {}).items()]
    return node.get("description", "").rstrip(".") + (": " + "; ".join(inner) if inner else "")


if __name__ == "__main__":
    PAGE.write_text(page())
