"""What a server's log says while its model loads."""

from datatrove_ckpt.inference.servers.server import last_line, read_log


def test_the_last_line_is_the_state_of_a_progress_bar_of_this_start(tmp_path):
    path = tmp_path / "server.log"
    path.write_text("an earlier server\nLoading shards: 10%\rLoading shards: 40%\n\n")
    assert last_line(read_log(path, 18)) == "Loading shards: 40%"
    assert last_line(read_log(tmp_path / "none", 0)) == ""
