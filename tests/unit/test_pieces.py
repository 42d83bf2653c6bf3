"""Pieces of half-written answers lie in the request cache, and are taken for answers nowhere."""

import orjson
import pytest

from datatrove_ckpt.checkpoint.checksummed_lines import add_checksum
from datatrove_ckpt.checkpoint.layout import KEPT_ANSWERS
from datatrove_ckpt.checkpoint.old_answers import _copy
from datatrove_ckpt.checkpoint.open_checkpoint import Snapshot
from datatrove_ckpt.checkpoint.request_cache import (
    AnswerKey,
    CachedAnswer,
    CachedRequest,
    RequestCache,
    read_answers,
)

KEY = AnswerKey(0, "hash", 0)
OTHERS = [
    AnswerKey(0, "has", 0),
    AnswerKey(0, "hash2", 0),
    AnswerKey(0, "hash", 1),
    AnswerKey(1, "hash", 0),
]


def row(ordinal, key, text="{}", ends_pieces=False):
    answer = CachedAnswer(text.encode(), None)
    return CachedRequest(0, ordinal, f"id {ordinal}", key, answer, ends_pieces)


@pytest.fixture
def cache(tmp_path):
    """Document 1 has an answer and a half one, document 2 only a half one."""
    (tmp_path / "00000").mkdir()
    cache = RequestCache(tmp_path / "00000" / "replay.sqlite3", tmp_path / "kept")
    cache.put([row(1, OTHERS[0]), row(1, KEY.piece(0)), row(2, KEY.piece(0)), row(2, KEY.piece(9))])
    return cache


def test_pieces_are_counted_as_no_answers(cache):
    assert [*cache.answer_counts()] == [(2, 0), (1, 1)]
    assert cache.count() == 1
    assert cache.answers(2).keys() == {KEY.piece(0), KEY.piece(9)}


def test_a_mirror_gets_pieces(cache, tmp_path):
    (tmp_path / "00000" / "run.json").touch()
    snapshot = Snapshot.of(tmp_path / "00000").with_answers(cache)
    assert snapshot.unfinished == {1, 2}
    assert len(snapshot.answers) == 4


def test_a_whole_answer_deletes_its_own_pieces_in_its_transaction(cache):
    cache.put([row(1, key.piece(number)) for key in OTHERS for number in (0, 10)])
    before = cache.answers(1).keys()
    # With the last piece in one group.
    cache.put([row(1, KEY.piece(64)), row(1, KEY, ends_pieces=True)])
    assert cache.answers(1).keys() == (before | {KEY}) - {KEY.piece(0)}
    assert cache.answers(2).keys() == {KEY.piece(0), KEY.piece(9)}
    cache.put([row(2, KEY)])
    assert len(cache.answers(2)) == 3


def test_a_kill_inside_the_transaction_keeps_the_pieces_and_no_answer(cache, tmp_path):
    cache._insert([(99, *row(2, KEY)[:3], *KEY, b"{}", None, 0)], [(2, 0, "hash:", "hash;", 0)])
    assert cache.answers(2).keys().isdisjoint({KEY.piece(0)})
    cache._connection.rollback()  # as SQLite after a kill
    assert cache.answers(2).keys() == {KEY.piece(0), KEY.piece(9)}


def test_a_run_with_other_requests_and_kept_answers_get_no_pieces(cache, tmp_path):
    cache.drop_chunk(0)
    assert [kept.key for kept in read_answers(tmp_path / "kept")] == [OTHERS[0]]
    of_earlier_release = add_checksum(orjson.dumps(row(5, KEY.piece(0)).to_json()))
    kept = (tmp_path / "kept").read_bytes() + of_earlier_release
    (tmp_path / "00000" / KEPT_ANSWERS).write_bytes(kept)
    cache.put([row(3, KEY.piece(0)), row(4, KEY)])
    cache.close()
    copy = _copy(tmp_path / "00000")
    assert sorted(copy.answer_counts()) == [(1, 1), (4, 1)]
    assert copy.answers_since(0, [3, 5]) == []
    copy.close()
