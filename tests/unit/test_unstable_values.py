"""A value that differs at each start is named when the run is made, and no other value is."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from datatrove_ckpt import InferenceConfig, InferenceRunner
from datatrove_ckpt.errors import ConfigError
from tests.jobs import writer
from tests.unit.test_identity import load

MODULE = """
import datetime
import os
import random
import secrets
import tempfile
import time
import uuid
from datetime import datetime as moment
from time import time as clock

def named():
    before = time.time()
    return f"run {os.getpid()}"

def loaded():
    time.time()
    return {"prompt": "Say"}

thing = object()
rng = random.Random(3)
LABELS = {"a", "b", "c"}
STARTED = time.time()
VALUE = EXPRESSION

def payload(document):
    return {"prompt": f"{VALUE} {document.text}"}

async def rollout(document, generate):
    return await generate(payload(document))
"""


@pytest.fixture(autouse=True)
def chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def make(folder: Path, rollout: Any, **settings: Any) -> InferenceRunner:
    settings = {"checkpoints_local_dir": str(folder / "checkpoints"), **settings}
    return InferenceRunner(rollout, InferenceConfig("dummy", "m"), writer(folder), **settings)


def rollout_with(folder: Path, expression: str) -> Any:
    path = folder / "script.py"
    path.write_text(MODULE.replace("EXPRESSION", expression))
    return load(path).rollout


@pytest.mark.parametrize(
    ("expression", "cause"),
    [
        ("time.time()", "comes from time.time()"),
        ("clock()", "comes from clock()"),
        ("int(time.time_ns() // 1000)", "comes from time.time_ns()"),
        ("f'run {os.getpid()}'", "comes from os.getpid()"),
        ("'run %d' % os.getpid()", "comes from os.getpid()"),
        ("'{}'.format(os.getpid())", "comes from os.getpid()"),
        ("os.path.join('/tmp', str(os.getpid()))", "comes from os.getpid()"),
        ("random.random()", "comes from random.random()"),
        ("random.choice(['a', 'b'])", "comes from random.choice()"),
        ("random.Random().random()", "comes from random.Random()"),
        ("uuid.uuid4().hex[:8]", "comes from uuid.uuid4()"),
        ("str(uuid.uuid1())", "comes from uuid.uuid1()"),
        ("secrets.token_hex(4)", "comes from secrets.token_hex()"),
        ("datetime.datetime.now().isoformat()", "comes from datetime.datetime.now()"),
        ("f'{moment.utcnow():%Y}'", "comes from moment.utcnow()"),
        ("str(datetime.date.today())", "comes from datetime.date.today()"),
        ("time.strftime('%H:%M')", "comes from time.strftime()"),
        ("tempfile.mkdtemp()", "comes from tempfile.mkdtemp()"),
        ("__import__('tempfile').mkdtemp()", "comes from __import__('tempfile').mkdtemp()"),
        ("{'id': [1, id(thing)]}", "comes from id()"),
        ("named()", "comes from os.getpid()"),
        ("STARTED if STARTED else 0", "comes from time.time()"),
        ("f'since {STARTED}'", "comes from time.time()"),
        ("', '.join(LABELS)", "comes from the order of a set"),
        ("list({'a', 'b'})", "comes from the order of a set"),
        ("str(thing)", "holds the address of an object"),
        ("f'{thing}'", "holds the address of an object"),
    ],
)
def test_a_value_that_differs_at_each_start_is_named(tmp_path: Path, expression: str, cause: str) -> None:
    rollout = rollout_with(tmp_path, expression)
    with pytest.raises(ConfigError) as refused:
        make(tmp_path, rollout)
    line = MODULE.splitlines().index("def payload(document):") + 1
    named = f"rollout_fn: The function payload ({tmp_path / 'script.py'}, line {line}) uses VALUE, which {cause}. "
    assert str(refused.value).startswith(named)
    assert "Compute it inside the function" in str(refused.value)


@pytest.mark.parametrize(
    "expression",
    [
        "'time.time()'",
        "rng.random()",
        "random.Random(7).choice(['a', 'b'])",
        "loaded()['prompt']",
        "time.strftime('%Y', (2026, 1, 1, 0, 0, 0, 0, 1, 0))",
        "str(datetime.date(2026, 1, 1))",
        "datetime.datetime.fromtimestamp(0).year",
        "sorted(LABELS)",
        "', '.join(sorted(LABELS))",
        "list({1, 2, 3})",
        "'<function f at 0x7f0a4c713d80>'",
        "os.environ.get('HOME')",
        "len(str(time.time()))",
        "uuid.uuid5(uuid.NAMESPACE_DNS, 'a').hex",
    ],
)
def test_a_value_that_is_the_same_at_each_start_is_not(tmp_path: Path, expression: str) -> None:
    make(tmp_path, rollout_with(tmp_path, expression))


def test_chance_with_a_seed_is_no_chance(tmp_path: Path) -> None:
    make(tmp_path, rollout_with(tmp_path, "random.seed(3) or random.random()"))


def test_order_of_sets_is_fixed_by_a_seed_of_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    make(tmp_path, rollout_with(tmp_path, "list(LABELS)"))


def test_a_variable_of_the_function_around_it_is_named(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import time\ndef main():\n    run = f'{time.time()}'\n    other = 1\n"
        "    async def rollout(document, generate):\n        return run, other\n    return rollout\n"
    )
    with pytest.raises(ConfigError, match=r"main.<locals>.rollout \(.*, line 5\) uses run, which comes from time.time"):
        make(tmp_path, load(path).main())


ARGUMENTS = """
import uuid
label = uuid.uuid4().hex
def payload(document, tag=str(uuid.uuid4())):
    return f"{document.text} {tag}"
async def calls(document, generate):
    return payload(document)
async def rollout(document, generate, *, tag=uuid.uuid4().hex):
    return tag
async def fixed(document, generate, label="fixed"):
    return label
def make(tag=str(uuid.uuid4()), label="fixed"):
    async def inner(document, generate):
        return tag + label
    return inner
"""


@pytest.mark.parametrize(
    ("expression", "named"),
    [
        ("module.rollout", "rollout"),
        ("module.calls", "payload"),
        ("module.make()", "make.<locals>.inner"),
        ("module.fixed", ""),
        ("module.make('given')", ""),
        ("functools.partial(module.rollout, tag='given')", ""),
    ],
)
def test_a_default_argument_that_differs_is_named_where_it_is_used(tmp_path: Path, expression: str, named: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(ARGUMENTS)
    rollout = eval(expression, {"module": load(path), "functools": functools})
    if not named:
        make(tmp_path, rollout)
        return
    with pytest.raises(ConfigError, match=r" uses tag, which comes from uuid.uuid4\(\)") as refused:
        make(tmp_path, rollout)
    assert str(refused.value).startswith(f"rollout_fn: The function {named} (")


@pytest.mark.parametrize("use", ["return time.time()", "global VALUE\n    VALUE = 2\n    return VALUE"])
def test_what_a_function_computes_or_assigns_itself_is_not_named(tmp_path: Path, use: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(f"import time\nVALUE = time.time()\nasync def rollout(document, generate):\n    {use}\n")
    make(tmp_path, load(path).rollout)


def test_without_checkpoints_nothing_is_named_and_with_accept_changes_it_is_a_warning(
    tmp_path: Path, log: list[str]
) -> None:
    rollout = rollout_with(tmp_path, "time.time()")
    plain = InferenceRunner(rollout, InferenceConfig("dummy", "m"), writer(tmp_path, None))
    assert plain.checkpoints_local_dir is None
    assert log == []
    make(tmp_path, rollout, accept_changes=True)
    assert len(log) == 1
    assert log[0].startswith("WARNING rollout_fn: The function payload ")


def test_a_script_hears_of_it_before_anything_is_made(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import time\nfrom datatrove.pipeline.writers import JsonlWriter\n"
        "from datatrove_ckpt import InferenceConfig, InferenceRunner\nRUN = time.time()\n"
        "async def rollout(document, generate):\n    return RUN\n"
        "writer = JsonlWriter('output', '${chunk_index}.jsonl')\n"
        "InferenceRunner(rollout, InferenceConfig('dummy', 'm'), writer, checkpoints_local_dir='checkpoints')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert f"The function rollout ({script}, line 5) uses RUN, which comes from time.time()." in done.stderr
    assert done.returncode == 1
    assert not (tmp_path / "checkpoints").exists()
