"""mirror_seconds: auto, against a remote that takes its time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt.checkpoint.interval import MIRROR_TUNING
from datatrove_ckpt.mirror import object_store
from datatrove_ckpt.mirror.mirror import RemoteMirror
from datatrove_ckpt.testing import FakeServer
from tests.jobs import documents, runner


def test_auto_mirrors_a_slow_remote_as_seldom_as_its_share_says(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirrors: list[RemoteMirror] = []
    begin, put = RemoteMirror.start, object_store.Effects.put

    def start(self: RemoteMirror, source: Any) -> None:
        mirrors.append(self)
        begin(self, source)

    def slow(self: object_store.Effects, *args: Any) -> Any:
        time.sleep(0.2)
        return put(self, *args)

    monkeypatch.setattr(RemoteMirror, "start", start)
    monkeypatch.setattr(object_store.Effects, "put", slow)
    step = runner(tmp_path, server, checkpoints_remote_dir=str(tmp_path / "remote"), mirror_seconds="auto")
    step.run(iter(documents(6)))
    # The last mirroring puts a part of a file and a manifest at least: 0.4 s, which is 5 % of 8.
    assert mirrors[0]._interval.seconds != MIRROR_TUNING.first
    assert mirrors[0]._interval.seconds > MIRROR_TUNING.shortest
