"""Long answers of a real vLLM, on CPU, go on with their next token after kills of the client and of
the server. float32 and temperature 0, so that an answer is the same in any batch.
"""

import signal
import sys
import urllib.request

import pytest

from tests import processes
from tests.half_answers import JOB, answered, tokens_in
from tests.patience import until
from tests.real.vllm_servers import vllm_server

pytestmark = pytest.mark.timeout(1800)

INTERVAL = 4
PLACES = 2
DOCUMENTS = 6
TOKENS = 48
PROBE = 48  # tokens of the test at each start
SLACK = 3  # tokens of each answer, while a piece is on its way to the disk
FLAGS = ("--enable-scale-out", "--dtype", "float32", "--served-model-name", "fake")

QUICK = (
    JOB.replace(
        "half_answers.STREAM_INTERVAL = 4",
        "half_answers.STREAM_INTERVAL = 4; half_answers._LONG = 1",
    )
    .replace('"max_tokens": 2048', f'"max_tokens": {TOKENS}')
    .replace("range(3)", f"range({DOCUMENTS})")
    .replace('f"text {index}"', 'f"Tell me a long story about the number {index}."')
    .replace("folder, url = sys.argv[1:]", "folder, half, *url = sys.argv[1:]")
    .replace("half_answers=True", 'half_answers=half == "True"')
)


def generated(url):
    with urllib.request.urlopen(f"{url}/metrics") as page:
        lines = page.read().decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total")
    )


def kept(folder):
    return sum(tokens_in(folder).values()) if folder.exists() else 0


def test_greedy_answers_are_the_same_after_kills(tmp_path):
    (tmp_path / "job.py").write_text(QUICK)

    def command(folder, half, *urls):
        return [sys.executable, str(tmp_path / "job.py"), str(folder), str(half), *urls]

    def finish(folder, half, *urls):
        done = processes.run(command(folder, half, *urls))
        assert done.returncode == 0, done.stderr
        return answered(folder)

    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    with vllm_server(tmp_path / "second", *FLAGS) as second:
        with vllm_server(tmp_path / "first", *FLAGS) as first:
            whole = finish(tmp_path / "whole", False, first)
            assert finish(tmp_path / "plain", True, first) == whole
            folder = tmp_path / "killed"
            before = generated(first)
            for number in range(3):
                process = processes.start(command(folder, True, first))
                least = kept(folder) + 30
                until(lambda least=least: kept(folder) >= least)
                process.send_signal([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM][number])
                output = process.communicate(timeout=100)[0]
                assert process.returncode in (-9, -15, 143), output
            assert finish(folder, True, first) == whole
            needed = sum(
                result["usage"]["completion_tokens"]
                for row in whole
                for result in row["metadata"]["rollout_results"]
            )
            twice = generated(first) - before - needed - 4 * PROBE
            print(f"{twice:g} of {needed} tokens were generated twice, at 3 kills of the client")
            assert twice <= 3 * PLACES * (INTERVAL + SLACK)
            # The server dies in the middle: the other one continues.
            folder = tmp_path / "at two"
            process = processes.start(command(folder, True, first, second))
            until(lambda: kept(folder) >= 60)
        output = process.communicate(timeout=600)[0]
        assert process.returncode == 0, output
        assert answered(folder) == whole
