"""What a server says while its model loads."""

from datatrove_ckpt.common.redaction import redact, remember
from datatrove_ckpt.inference.servers.server import (
    last_line,
    read_log,
    starting_line,
)


def test_the_line_shows_the_end_of_the_log_without_secrets(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(
        "an earlier server\nLoading shards: 10%\rLoading shards: 40% with key abcdefgh12345678\n\n"
    )
    remember("abcdefgh12345678")
    line = starting_line("vllm", 61.4, 1800.0, path, redact(read_log(path, 18)))
    assert line == (
        f"The vllm server is starting, 61 s of at most 1800 s. The last line of its log ({path}): "
        "Loading shards: 40% with key ***"
    )
    empty = starting_line("vllm", 30.0, 1800.0, tmp_path / "none", read_log(tmp_path / "none", 0))
    assert empty.endswith(f"Its log is empty so far ({tmp_path / 'none'}).")


def test_a_line_of_a_log_cannot_speak_to_the_terminal():
    assert last_line("one\n\x1b[32mtwo\x1b[0m\x07\x9b2J\n \n") == "two  2J"
    assert last_line("x" * 300) == "x" * 200 + "..."
    assert last_line("\n\n") == ""
