"""Differences of a replay that an unedited rollout makes at another start."""

import os
import subprocess

from datatrove_ckpt.common.redaction import remember
from datatrove_ckpt.generation import recorded_documents, replay, side_effects
from tests import golden


def record(**fields):
    return replay.RecordedDocument("0", 0, 0, "id", "", "", [], "", "", [], **fields)


def kind(old, new):
    return replay.compared(record(), "", {"a": [old]}, {"a": [new]}).kind


test_dates_and_times_are_no_real_difference_and_other_numbers_and_words_are = golden.shows(
    "kinds_of_differences", globals()
)


def test_another_node_or_process_is_no_real_difference(monkeypatch):
    monkeypatch.setattr(recorded_documents.platform, "node", lambda: "node8.cluster")
    before = record(process=["node7", "12", "4711"])
    old = {"host": "node7", "job": 12, "by": "pid 4711 on node7.cluster"}
    new = {"host": "node8", "job": 12, "by": f"pid {os.getpid()} on node8.cluster"}
    assert replay.compared(before, "", old, new).kind == "changing"
    assert replay.compared(before, "", old, {**new, "host": "NEW"}).kind == "real"


def test_a_secret_that_an_excerpt_cuts_is_not_shown():
    remember("0123456789abcdef-secret")
    shown = str(replay.compared(record(), "", "x" * 50 + "0123456789abcdef-secret", "y"))
    assert "0123" not in shown


def test_an_edit_beside_words_in_another_order_is_the_same_in_two_processes():
    differences = [
        replay.compared(record(), "", "OLD: red, green", f"NEW: {words}")
        for words in ("green, red", "red, green")
    ]
    assert differences[0].new_words == differences[1].new_words
    orders = [replay.compared(record(), "", "a, b, c", words) for words in ("c, b, a", "b, a, c")]
    assert orders[0].new_words != orders[1].new_words


def test_a_file_is_written_although_the_working_folder_is_gone(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    folder = os.open(tmp_path, os.O_RDONLY)
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=folder))
    os.close(folder)
    assert (tmp_path / "file").exists()


def test_a_program_is_kept_open_until_it_has_ended():
    setup = side_effects.SETUP
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as program:
        assert setup.lasting() == "keep a program open"
        program.kill()
    assert setup.lasting() == ""
