"""Unedited code is not refused by the replay check."""

from datatrove_ckpt.generation import replay
from tests.integration.test_replay_check import go_on, recorded, says_word, start


def test_a_change_that_is_accepted_is_not_refused_later_where_time_did_not_suffice(
    tmp_path, server, monkeypatch
):
    monkeypatch.setenv("WORD", "OLD")
    start(tmp_path, server, says_word, monkeypatch)
    monkeypatch.setattr(replay, "repeats_itself", lambda step, root: True)
    monkeypatch.setenv("WORD", "NEW")
    monkeypatch.setenv("stop", "1")
    settings = {"config": {"max_concurrent_documents": 1, "default_generation_params": {"n": 1}}}
    with monkeypatch.context() as patch:
        patch.setattr(replay.Replays.check, "__defaults__", (0.0,))
        start(tmp_path, server, says_word, monkeypatch, accept_changes=True, **settings)
    assert len(recorded(tmp_path)) == 0
    go_on(tmp_path, server, says_word, **settings)
