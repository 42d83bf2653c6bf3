"""What a server says while its model loads."""

import asyncio
import itertools

from datatrove_ckpt.common.redaction import Redactor
from datatrove_ckpt.inference.servers.server import (
    last_line,
    read_log,
    starting_line,
    wait_for_first,
)


async def test_a_server_that_starts_says_so_until_it_is_ready(log):
    ready = asyncio.Event()
    loop, lines = asyncio.get_running_loop(), itertools.chain(["first"], itertools.repeat("second"))

    def line(waited):
        text = next(lines)
        if text == "second":
            loop.call_soon_threadsafe(ready.set)
        return text

    task = asyncio.create_task(ready.wait())
    await wait_for_first((task,), 3600.0, line, every=0.001)
    assert task.done()
    assert [entry.strip() for entry in log[:2]] == ["INFO first", "INFO second"]


async def test_its_window_ends_the_wait_without_a_line(log):
    never = asyncio.create_task(asyncio.Event().wait())
    await wait_for_first((never,), 0.01, lambda waited: "said", every=3600.0)
    assert not never.done()
    never.cancel()
    assert log == []


def test_the_line_shows_the_end_of_the_log_without_secrets(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(
        "an earlier server\nLoading shards: 10%\rLoading shards: 40% with key abcdefgh12345678\n\n"
    )
    line = starting_line(
        "vllm", 61.4, 1800.0, path, Redactor("Bearer abcdefgh12345678")(read_log(path, 18))
    )
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
