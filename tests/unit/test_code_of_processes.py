"""The identity of code in programs as people start them: command lines, environments, and the cells
of a notebook.
"""

import linecache
import os
import sys
import types

import pytest

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.user_code import statements
from datatrove_ckpt.user_code.code_identity import code_identity
from datatrove_ckpt.user_code.statements import digest
from tests import golden, processes
from tests.user_modules import as_main

SCRIPT = """
import argparse, functools, json, os, sys
from pk.settings import STYLE
from datatrove_ckpt.user_code.code_identity import code_identity
from datatrove_ckpt.user_code.statements import digest

class Asker:
    def __init__(self, prompt, limit):
        self.request = {"prompt": "", "max_tokens": limit}
        self.prompt = prompt
    async def __call__(self, document, generate):
        self.request["prompt"] = self.prompt + document.text
        return await generate(self.request)

async def ask(document, generate, words):
    return await generate({"prompt": words + STYLE + document.text})

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="closure")
    parser.add_argument("--prompt", default="Say")
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--tasks", type=int, default=4)
    args = parser.parse_args()
    options = vars(args)
    async def closure(document, generate):
        async def asked():
            return await generate({"prompt": args.prompt + document.text, "max_tokens": args.limit})
        return await asked()
    async def of_dict(document, generate):
        return await generate({"prompt": options["prompt"] + document.text})
    async def of_environment(document, generate):
        return await generate({"prompt": ENDING + Words.ENDING + document.text})
    rollouts = {
        "closure": closure,
        "dict": of_dict,
        "object": Asker(args.prompt, args.limit),
        "partial": functools.partial(ask, words=args.prompt),
        "environment": of_environment,
    }
    print(json.dumps(code_identity(rollouts[args.kind], None).fields, sort_keys=True))

ENDING = os.environ.get("EDITS_ENDING", "")
class Words:
    ENDING = os.environ.get("EDITS_CLASS_ENDING", "")
if __name__ == "__main__":
    main()
"""


@pytest.fixture
def code_of(tmp_path, monkeypatch):
    """Describes the rollout of a program that Python runs."""
    return lambda source: code_identity(as_main(tmp_path, source, monkeypatch).rollout, None)


def identity(folder, start):
    """What a process prints that is started with this environment and these arguments."""
    words = start.split()
    variables = dict(word.split("=", 1) for word in words if not word.startswith("--"))
    arguments = [word for word in words if word.startswith("--")]
    command = [sys.executable, str(folder / "script.py"), *arguments]
    done = processes.run(command, env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def project(tmp_path):
    (tmp_path / "pk").mkdir()
    (tmp_path / "pk" / "settings.py").write_text(
        'import os\nSTYLE = os.environ.get("EDITS_STYLE", "")\n'
    )
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.matrix(
    "kind, seen, harmless",
    golden.values("second_starts", globals()),
)
def test_a_second_start_is_another_run_only_if_its_command_line_or_environment_changes_the_work(
    project, kind, seen, harmless
):
    first = identity(project, f"--kind={kind}")
    for start in seen:
        assert identity(project, f"--kind={kind} {start}") != first, start
    assert identity(project, f"--kind={kind} {harmless}") == first


CELLS = [
    "import os\nPROMPT = 'Say '",
    "def helper(text):\n    return PROMPT + text",
    "class Words:\n    def shown(self, text):\n        return helper(text)",
    "async def rollout(document, generate):\n    return await generate({'prompt': Words().shown(document.text)})",
]


@pytest.fixture
def notebook(monkeypatch):
    """Runs cells as IPython does, and returns the identity of the ``rollout`` that they define."""
    cells = {}
    monkeypatch.setattr(linecache, "cache", cells)

    def run(pattern, sources):
        main = types.ModuleType("__main__")
        monkeypatch.setitem(sys.modules, "__main__", main)
        cells.clear()
        main.In = ["", *sources]
        for number, source in enumerate(sources):
            name = pattern.format(number)
            if "ipykernel" in pattern:  # it names equal cells alike
                name = pattern.format(digest(source))
            cells[name] = (len(source), None, source.splitlines(keepends=True), name)
            exec(compile(source, name, "exec"), vars(main))
        identity = code_identity(vars(main)["rollout"], None)
        # Not compared with what version 7 wrote, which counted each cell that ever ran.
        assert identity.version == 8
        return identity.fields

    return run


@pytest.mark.parametrize("pattern", ["<ipython-input-{0}-abc>", "/tmp/ipykernel_12/{0}.py"])
@pytest.mark.parametrize(
    "cell, old, new",
    [
        (0, "Say", "Sing"),
        (1, "PROMPT + text", "text + PROMPT"),
        (2, "(text)", "(text + '.')"),
        (3, ".text", ".id"),
    ],
)
def test_an_edit_in_any_cell_of_a_notebook_is_seen(notebook, pattern, cell, old, new):
    first = notebook(pattern, CELLS)
    assert notebook(pattern, CELLS) == first
    edited = [*CELLS]
    edited[cell] = edited[cell].replace(old, new)
    assert edited != CELLS
    assert notebook(pattern, edited) != first


EDITED = golden.named("edited_cells", globals())
CLASS = "class Words:\n    def __init__(self, word):\n        self.word = word"
ROLLOUT = "async def rollout(document, generate):\n    return await generate({'prompt': PROMPT})"


@pytest.mark.parametrize("pattern", ["<ipython-input-{0}-abc>", "/tmp/ipykernel_12/{0}.py"])
@pytest.mark.parametrize("name", EDITED)
def test_a_cell_counts_as_it_was_run_last(notebook, pattern, name):
    """The identity is equal to that of a new kernel, where the notebook is run from its top."""
    old, new = EDITED[name]
    first = notebook(pattern, [CLASS, old, ROLLOUT])
    edited = notebook(pattern, [CLASS, old, ROLLOUT, new])
    assert edited != first
    assert edited == notebook(pattern, [CLASS, new, ROLLOUT])
    assert notebook(pattern, [CLASS, old, ROLLOUT, new, old]) == first
    assert notebook(pattern, [CLASS, old, ROLLOUT, new, old, new]) == edited
    assert notebook(pattern, [CLASS, old, ROLLOUT, f"{old}  # now", ROLLOUT]) == first


@pytest.mark.parametrize(
    "cells",
    [
        ["PROMPT = 'Say '", "PROMPT = PROMPT + 'it'"],
        ["PROMPT = 'Say '", "OTHER = PROMPT", "PROMPT = OTHER + 'it'"],
        ["PROMPT = 'Say '", "def more():\n    return PROMPT + 'it'", "PROMPT = more()"],
        ["PROMPT = {'a': 'Say '}", "PROMPT['b'] = 1"],
    ],
)
def test_a_value_that_a_later_cell_uses_counts(notebook, cells):
    pattern = "/tmp/ipykernel_12/{0}.py"
    first = notebook(pattern, [*cells, ROLLOUT])
    edited = [cells[0].replace("Say", "Sing"), *cells[1:], ROLLOUT]
    assert notebook(pattern, edited) != first


def test_a_secret_is_in_no_field_wherever_the_rollout_takes_it_from(code_of):
    source = """
import types
TABLE = {"password": "s3cret", "headers": {"Authorization": "s3cret"}, "prompt": "Say"}
def make():
    args = types.SimpleNamespace(api_key="s3cret", prompt="Say")
    options = {"password": "s3cret", "prompt": "Say"}
    async def rollout(document, generate):
        headers = [TABLE["headers"]["Authorization"], TABLE["password"], options["password"], args.api_key]
        return await generate({"prompt": TABLE["prompt"] + options["prompt"] + args.prompt, "extra_headers": headers})
    return rollout
rollout = make()
"""
    fields = code_of(source).fields
    assert "s3cret" not in str(fields)
    assert sum("hash scrypt" in str(value) for value in fields.values()) == 2
    assert sum(value == "Say" for value in fields.values()) == 2


LABELS = """
import functools, json
from datatrove_ckpt.user_code.code_identity import code_identity
from datatrove_ckpt.user_code.statements import digest
LABELS = {"one", "two", "three", "four", "five"}
async def ask(document, generate, labels):
    return labels
class Asker:
    def __init__(self):
        self.labels = LABELS
    __call__ = ask
rollouts = functools.partial(ask, labels=LABELS), Asker()
print(json.dumps([code_identity(one, None).fields for one in rollouts]))
"""


def test_the_order_of_a_set_that_a_rollout_is_given_is_no_edit(tmp_path):
    (tmp_path / "script.py").write_text(LABELS)
    first, second = (identity(tmp_path, f"PYTHONHASHSEED={seed}") for seed in (1, 2))
    assert "three" in first
    assert first == second


def test_a_start_parses_only_files_whose_text_holds_a_name_that_is_reached(
    tmp_path, monkeypatch, code_of
):
    for number in range(200):
        lines = [f"def helper_{number}_{part}():\n    return {part}\n" for part in range(30)]
        (tmp_path / f"module_{number}.py").write_text("import module_0\n" + "\n".join(lines))
    imports = "".join(f"import module_{number}\n" for number in range(200))
    body = "return module_7.helper_7_3(), module_8.helper_8_4()"
    parsed = []
    real = statements.parse
    monkeypatch.setattr(statements, "parse", lambda text: parsed.append(text) or real(text))
    monkeypatch.syspath_prepend(tmp_path)
    code = code_of(f"{imports}\nasync def rollout(document, generate):\n    {body}\n")
    assert {"uses.helper_7_3 code", "uses.helper_8_4 code"} < code.fields.keys()
    assert len({*parsed}) == 3


def test_a_value_is_compared_although_its_name_is_given_an_id_elsewhere(code_of):
    source = """
import functools
def note(prompt):
    return prompt
async def ask(document, generate, prompt, sample):
    return note(prompt=document.id)
rollout = functools.partial(ask, prompt="Say", sample=3)
"""
    fields = code_of(source).fields
    assert fields["rollout_fn.prompt"] == "Say"
    assert fields["rollout_fn.sample"] == 3


def test_a_rollout_without_any_code_is_refused():
    silent = type("Silent", (), {"__module__": __name__})()
    with pytest.raises(ConfigError, match=r"source of Silent is not in .* Set rollout_version"):
        code_identity(silent, None)


def test_a_change_is_named_with_its_file_its_line_and_the_way_from_the_rollout(
    tmp_path, monkeypatch, code_of
):
    source = """
from words_that_are_named import clean
async def rollout(document, generate):
    return clean(document.text)
"""
    (tmp_path / "words_that_are_named.py").write_text(
        "def clean(text):\n    return helper(text)\n\ndef helper(text):\n    return text\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert code_of(source).made.notes["uses.helper code"] == (
        f"helper in {tmp_path}/words_that_are_named.py, line 4: rollout_fn -> clean -> helper"
    )


def test_a_class_without_a_file_counts_by_its_bytecode():
    def made(ending):
        space = {"__name__": "nowhere"}
        source = f"class Asker:\n    async def __call__(self, document, generate):\n        return {ending!r}\n"
        exec(source, space)
        return code_identity(space["Asker"](), None).fields

    assert made("!") == made("!")
    assert made("!") != made("?")
