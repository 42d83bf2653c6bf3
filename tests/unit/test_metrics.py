"""A rank's metrics: their names, their text, and the port."""

import os
import re
import socket
from dataclasses import replace

from datatrove_ckpt.common.counts import METRICS, InputPosition
from datatrove_ckpt.generation.prometheus import (
    PREFIX,
    metrics_port,
)
from tests.metrics import PORT, exposition, get, host, metrics, samples

__all__ = ["host"]  # fixtures


# names and text ----------------------------------------------------------------------------------


def test_every_metric_is_shown_and_each_family_once_for_all_ranks():
    text = exposition([metrics(3), metrics(5)]).decode()
    types = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    assert types == [PREFIX + heading.split()[0] for heading in METRICS]
    assert samples(text, rank="5")["documents_total"] == 7
    unknown = replace(metrics(5), progress=replace(metrics(5).progress, position=InputPosition()))
    assert not [name for name in samples(exposition([unknown]).decode()) if "input" in name]


# settings ----------------------------------------------------------------------------------------


# the port ----------------------------------------------------------------------------------------


def shown(host, rank, state="running"):
    return metrics_port(os.getpid(), host, PORT).shows(lambda: metrics(rank, state))


def test_ranks_of_a_process_are_at_one_port_and_one_that_has_ended_is_shown_for_a_while_and_once(
    host,
):
    with shown(host, 1), shown(host, 2):
        assert set(re.findall(r'rank_info{.*rank="(\d+)"', get(host))) == {"1", "2"}
    assert samples(get(host), rank="1")["documents_total"] == 7
    with shown(host, 1, "done"):
        pass
    assert samples(get(host), rank="1")["rank_state done"] == 1
    with shown(host, 1):
        assert get(host).count('rank_info{host="node7",job="4711_5",rank="1"') == 1
        assert samples(get(host), rank="1")["rank_state running"] == 1


def test_where_a_port_is_taken_the_next_one_is(host, log):
    with socket.create_server((host, PORT)), socket.create_server((host, PORT + 1)), shown(host, 2):
        assert samples(get(host, PORT + 2), rank="2")["documents_total"] == 7
    assert f"{PORT} is taken; this process has {host}:{PORT + 2}" in log[0]
