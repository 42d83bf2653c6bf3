"""A damaged request cache costs answers, says so once, and nothing else; a disk that fails is not
damage.
"""

import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from datatrove_ckpt.checkpoint.request_cache import (
    AnswerKey,
    CachedAnswer,
    CachedRequest,
    RequestCache,
)
from datatrove_ckpt.errors import StorageFailed
from tests import golden


def request(ordinal, text="{}"):
    return CachedRequest(
        0, ordinal, f"id {ordinal}", AnswerKey(0, "hash", 0), CachedAnswer(text.encode(), None)
    )


@pytest.fixture
def path(tmp_path):
    """A cache of a few pages with answers of 40 documents."""
    path = tmp_path / "replay.sqlite3"
    cache = RequestCache(path)
    cache.put([request(ordinal, "x" * 2000) for ordinal in range(40)])
    cache.close()
    return path


def execute(path, statement):
    with sqlite3.connect(path) as connection:
        connection.executescript(statement)
    connection.close()


def aside(path):
    return sorted(found.name.partition("Z")[2] for found in path.parent.glob("*.damaged-*"))


@golden.rows("damaged_caches")
def test_a_damaged_cache_is_set_aside_and_said_once(path, log, code):
    eval(code)
    cache = RequestCache(path)
    for (
        ordinal,
        _,
    ) in cache.answer_counts():  # where the first page is whole, the first read shows it
        cache.answers(ordinal)
    cache.put([request(50)])
    assert dict(cache.answer_counts()).keys() == {50}
    cache.close()
    (said,) = log.said("is damaged")
    assert "WARNING The request cache" in said
    assert "Its answers are requested again." in said
    golden.hold("damaged_caches", code, str(aside(path)))
    again = RequestCache(path)
    assert set(again.answers(50)) == {AnswerKey(0, "hash", 0)}
    again.close()
    assert len(log.said("is damaged")) == 1


def test_a_kill_while_the_first_cache_is_made_is_no_damage(tmp_path, log):
    path = tmp_path / "replay.sqlite3"
    code = """if True:
        import os, sqlite3, sys
        connection = sqlite3.connect(sys.argv[1])
        connection.execute("PRAGMA cache_size=0")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("CREATE TABLE t (a)")
        os.kill(os.getpid(), 9)
    """
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    journal = Path(f"{path}-journal")
    assert (path.stat().st_size, journal.stat().st_size) == (0, 512)
    RequestCache(path).close()
    assert not log.said("is damaged")
    assert aside(path) == []


def test_damage_that_shows_in_the_middle_of_a_run_costs_answers_only(path, log):
    data = bytearray(path.read_bytes())
    # The pages of answers; those of the schema and the index stay.
    for page in range(3, len(data) // 4096):
        data[page * 4096 : page * 4096 + 100] = b"\xff" * 100
    path.write_bytes(data)
    cache = RequestCache(path)
    before = cache.last_answer
    for ordinal in range(40):
        cache.answers(ordinal)
    cache.put([request(50)])
    assert cache.last_answer > before, "a mirror asks for the answers after a number"
    assert set(cache.answers(50)) == {AnswerKey(0, "hash", 0)}
    cache.close()
    assert len(log.said("is damaged")) == 1


@pytest.mark.parametrize("column", ["doc_id", "payload_hash", "result"])
def test_a_damaged_row_is_asked_again_and_said(path, log, column):
    execute(path, f"UPDATE request_cache SET {column} = 9 WHERE ordinal = 7")
    cache = RequestCache(path)
    assert cache.answers(7) == {}
    assert len(cache.answers(8)) == 1
    cache.close()
    (said,) = log.said("damaged")
    assert "Saved answers of document 7" in said
    assert "They are requested again." in said


@pytest.mark.parametrize("ordinal", ["9999999999", "'x'", "x'ff'"])
def test_a_damaged_ordinal_does_not_mean_that_the_input_has_shrunk(path, ordinal):
    execute(path, f"UPDATE request_cache SET ordinal = {ordinal} WHERE ordinal = 7")
    cache = RequestCache(path)
    assert dict(cache.answer_counts()).keys() == set(range(40)) - {7}
    cache.close()


def test_any_flipped_bit_costs_answers_at_most(path):
    whole, chance = path.read_bytes(), random.Random(1)
    for _ in range(50):
        data, at = bytearray(whole), chance.randrange(len(whole))
        data[at] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        cache = RequestCache(path)
        dict(cache.answer_counts()).keys()
        for ordinal in range(40):
            found = cache.answers(ordinal)
            assert found in ({}, {AnswerKey(0, "hash", 0): CachedAnswer(b"x" * 2000, None)}), at
        cache.drop_chunk(0)
        cache.close()


def test_a_damaged_index_names_documents_only_and_comes_to_an_end(path):
    with sqlite3.connect(path) as connection:
        ((page,),) = connection.execute(
            "SELECT rootpage FROM sqlite_schema WHERE name LIKE 'sqlite_autoindex%'"
        )
    connection.close()
    whole, end = path.read_bytes(), page * 4096
    for bit in range(8 * 13):  # its first record: an ordinal, a rollout, a hash, an occurrence
        data = bytearray(whole)
        data[end - 1 - bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        cache = RequestCache(path)
        assert {type(ordinal) for ordinal, _ in cache.answer_counts()} <= {int}, bit
        cache.close()


def test_a_full_disk_is_no_damage(path):
    cache = RequestCache(path)
    cache._connection.execute("PRAGMA max_page_count=1")  # no page more than there are
    with pytest.raises(StorageFailed, match="full"):
        cache.put([request(50, "x" * 100_000)])
    cache.close()
    assert aside(path) == []
