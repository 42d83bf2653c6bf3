"""Makes pages of what is not in docs/: README, the API, and the files that pages link to."""

import itertools
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import datatrove_ckpt
from datatrove_ckpt import readers, rollouts

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    readme = (ROOT / "README.md").read_text()
    made = {"index.md": readme.replace("](docs/", "]("), "api.md": _api()}
    for path in (ROOT / "configs").iterdir():
        made[f"configs/{path.name}"] = path.read_text()
    made["extra.css"] = (ROOT / ".site/extra.css").read_text()
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    markdown = markdown.replace("](../README.md", "](index.md")
    return re.sub(r"\]\(\.\./(configs/)", r"](\1", markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return re.sub(r"<table>\n<thead>.*?</table>", _name_cells, html, flags=re.DOTALL)


def _name_cells(match: re.Match[str]) -> str:
    """Gives each cell of a wide table its column's name, which extra.css shows on a phone."""
    table = match[0]
    heads = re.findall(r"<th.*?>(.*?)</th>", table)
    if len(heads) < 3:
        return table
    names = itertools.cycle(re.sub(r"<.*?>", "", head).replace('"', "&quot;") for head in heads)
    table = table.replace("<table>", "<table data-wide>")
    return re.sub(r"<td\b", lambda _: _cell(next(names)), table)


def _cell(name: str) -> str:
    return f'<td data-column="{name}"' if name else "<td"


def _api() -> str:
    text = "# API\n\n"
    for module in (datatrove_ckpt, rollouts, readers):
        text += f"## `{module.__name__}`\n\n"
        for name in sorted(module.__all__):
            found = getattr(module, name)
            # datatrove's own names, and types, are explained where they are used.
            if getattr(found, "__module__", "").startswith("datatrove_ckpt") and found.__doc__:
                text += f"::: {found.__module__}.{found.__qualname__}\n\n"
    return text
