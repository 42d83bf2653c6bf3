"""Makes pages of what is not in docs/: README, the API, and the files that pages link to."""

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
