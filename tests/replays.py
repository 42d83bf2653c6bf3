"""A job that stops at its last document, and goes on."""

import os

import pytest

from datatrove_ckpt.errors import DocumentFailed
from tests.jobs import chat, run_job

ONE = {"max_concurrent_documents": 1}


def first_then(number, rollout):
    """The rollout, which fails at the document of this number until ``WORDS`` are changed."""

    async def stops(document, generate):
        if document.id == f"id {number}" and "stop" in os.environ:
            raise RuntimeError("not yet")
        return await rollout(document, generate)

    return stops


async def says_word(document, generate):
    return await generate(chat(f"{document.text} {os.environ.get('WORD')}"))


def start(folder, server, rollout, monkeypatch, number=6, **changes):
    """An attempt that fails at the last document, so that the next one goes on."""
    changes.setdefault("config", ONE)
    monkeypatch.setenv("stop", "1")
    with pytest.raises(DocumentFailed, match="not yet"):
        run_job(folder, server, number, first_then(number - 1, rollout), **changes)
    monkeypatch.delenv("stop")


def go_on(folder, server, rollout, number=6, **changes):
    run_job(folder, server, number, first_then(number - 1, rollout), **changes)


def recorded(folder):
    return sorted((folder / "checkpoints" / "recorded").glob("[0-9a-f]*.json"))
