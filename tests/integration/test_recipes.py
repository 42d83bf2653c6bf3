"""Recipes whose rollouts call tools, as docs/recipes.md has them: killed at each request and each
call, they call nothing twice, and end with the same bytes.
"""

import json
import os
import re
import shlex
import signal
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import create_autospec

import huggingface_hub
import pytest

from datatrove_ckpt.testing import FakeServer, outputs
from tests import processes
from tests.jobs import rows
from tests.kept import answers_kept
from tests.pages import blocks, section
from tests.patience import until
from tests.typed_in import RECIPES, here_instead, of, type_in, write_files

CODE, SEARCH, BEST = "Code with tests", "Search", "Best of n"
TOOLS = {CODE: "run_tests", BEST: "passes"}
"""Functions that do not ask the server."""
NOTED = """

def noted(function):
    import json
    from urllib.request import Request, urlopen

    def call(*arguments):
        body = json.dumps({{"arguments": arguments}}).encode()
        with urlopen(Request("{url}/call", body)):
            return function(*arguments)

    return call


{tool} = noted({tool})
"""
"""Makes the server see each call of a tool."""
WRONG = "def add(a, b):\n    return a"
RIGHT = "```python\ndef add(a, b):\n    return a + b\n```"
PAGE = {"title": "Rain", "content": "It falls.", "url": "http://a.org"}
EXPECTED = {
    CODE: {"passed": True, "tries": 2, "error": "", "answer": RIGHT},
    SEARCH: {"sources": ["http://a.org"], "answer": "1 source [1]"},
    BEST: {"candidate": 3, "tries": 4},
}


class Model:
    """The server of a recipe. Kills its process at the request or call after a number of them.

    Attributes:
        left: number of requests and calls until then.
        answered: how often each request and call was answered.
        process: of the current attempt.
    """

    def __init__(self):
        self.left = sys.maxsize
        self.answered = Counter()
        self.process = None
        self.server = FakeServer(self._answer, self._status)
        self.server.paths["/search"] = lambda payload: {"results": [PAGE]}
        self.server.paths["/call"] = lambda payload: {}
        self._seeds = {}

    def _status(self, payload, times):
        self.left -= 1
        if self.left < 0:
            kept = self.answered.total()
            checkpoints = Path("runs/killed/checkpoints")
            until(lambda: self.process and answers_kept(checkpoints) >= kept)
            os.killpg(self.process.pid, signal.SIGKILL)
            return 500
        self.answered[json.dumps(payload, sort_keys=True)] += 1
        return None

    def _answer(self, payload, times):
        if "seed" in payload:  # the first two answers do not pass
            number = self._seeds.setdefault(payload["seed"], len(self._seeds))
            return "word " * 30 if number < 2 else f"short {payload['seed']}"
        said = payload["messages"][-1]["content"]
        if "code only" in said:
            return WRONG
        if said.startswith("Correct"):
            assert "AssertionError" in said
            return RIGHT
        return (
            " rain "
            if "Web search query" in said
            else f"{said.count('[1] Rain: It falls.')} source [1]"
        )


@pytest.fixture
def model():
    model = Model()
    with model.server:
        yield model


@pytest.fixture
def words(here, model, heading, monkeypatch):
    """A recipe's command, for one document."""
    write_files(RECIPES, model.server)
    Path("documents").mkdir()
    Path("documents/a.jsonl").write_text('{"text": "Why does it rain?", "id": "a"}\n')
    (block,) = of(heading)
    *lines, line = here_instead(block.text, model.server).splitlines()
    for other in lines:
        type_in(other)
    words = shlex.split(line)[1:]
    module = words[words.index("--rollout") + 1].partition(".")[0]
    monkeypatch.delitem(sys.modules, module, raising=False)  # of another test
    if heading in TOOLS:
        with Path(f"{module}.py").open("a") as file:
            file.write(NOTED.format(url=model.server.url, tool=TOOLS[heading]))
    if heading == BEST:
        words += ["--seed", "7"]  # the server gives each of equal requests another answer
    return words


@pytest.mark.parametrize(
    "heading",
    [BEST, *(pytest.param(heading, marks=pytest.mark.slow) for heading in (CODE, SEARCH))],
)
def test_a_recipe_that_is_killed_at_each_request_and_call_makes_none_twice(
    command, model, words, heading
):
    command(*words)
    run_folder = words.index("--run-folder") + 1
    expected = outputs(Path(words[run_folder], "output"))
    assert len(expected) == 1
    answered = model.answered.copy()
    model.answered.clear()
    # So that no two requests are in flight at a kill: which of them came would depend on timing.
    apart = 3 if heading == BEST else 1
    kills = 0
    words[run_folder] = "runs/killed"
    code = None
    while code != 0:
        assert kills < 10
        model.left = apart
        model.process = None
        model.process = processes.start([sys.executable, "-m", "datatrove_ckpt", *words])
        model.process.communicate(timeout=400)
        code = model.process.returncode
        kills += code == -signal.SIGKILL
    assert kills == (answered.total() - 1) // apart
    assert model.answered == answered
    assert outputs(Path("runs/killed/output")) == expected
    (row,) = rows(Path("runs/killed"))
    assert row.items() >= EXPECTED[heading].items()


@pytest.mark.slow
@pytest.mark.parametrize(
    "code, error",
    [
        ("a = 1", ""),
        ("assert __name__ != '__main__'", ""),
        ("import os; assert 'PATH' not in os.environ and os.listdir() == ['output']", ""),
        ("import resource as r; assert r.getrlimit(r.RLIMIT_NPROC) == (0, 0)", ""),
        ("import os; assert os.getsid(0) == os.getpid()", ""),  # no Ctrl-C reaches it
        ("import signal; assert signal.getitimer(signal.ITIMER_REAL)[0] > 0", ""),
        ("import sys; sys.stdout.buffer.write(bytes([255]))", ""),
        ("1 / 0", "ZeroDivisionError"),
        ("import sys; sys.exit()", "Ended early"),
        ("while True: pass", "Ended early"),
        ("import time; time.sleep(600)", "Timeout"),
        ("a = bytearray(2**31)", "MemoryError"),
        ("open('a', 'w').write('a' * 10**7)", "File too large"),
        ("while True: print('a' * 1000)", "aaaa"),
    ],
)
def test_the_limits_of_the_code_with_tests(code, error):
    (block,) = [one for one in blocks("python", RECIPES) if "run_tests" in one.text]
    seconds = 1 if error == "Timeout" else 600
    text = block.text.replace('"CPU": 5', '"CPU": 1').replace("timeout=20", f"timeout={seconds}")
    names = {"__name__": "code_with_tests"}
    exec(text, names)
    printed = names["run_tests"](code)
    assert error in printed if error else printed == ""
    assert len(printed) <= 2000


@pytest.mark.skipif(not hasattr(huggingface_hub, "Sandbox"), reason="an older release")
def test_the_sandbox_takes_what_the_page_gives_it():
    sandbox = create_autospec(huggingface_hub.Sandbox)
    machine = create_autospec(huggingface_hub.Sandbox, instance=True)
    sandbox.create.return_value = machine
    (call,) = re.findall(r"`(Sandbox\..*)`", section(RECIPES, f"## {CODE}"))
    eval(call, {"Sandbox": sandbox, "code": "1 / 0"})
    assert machine.run.call_args.args == (["python", "-c", "1 / 0"],)
