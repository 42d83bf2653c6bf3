"""The process that forks what tests start."""

from tests.forked import _Server


def test_the_server_ends_while_a_worker_of_a_loader_has_its_socket():
    server = _Server()
    with server._socket.dup():
        server._close()
