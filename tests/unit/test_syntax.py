"""Source is parsed by one thread at a time:

CPython 3.11 fails with SystemError when two do it at once.
"""

import ast
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from datatrove_ckpt.user_code import statements

PACKAGE = Path(statements.__file__).parent.parent


def test_no_other_module_parses_code():
    parsing = [
        path for path in PACKAGE.rglob("*.py") if re.search("ast.parse|ONLY_AST", path.read_text())
    ]
    assert parsing == [PACKAGE / "user_code/statements.py"]


def test_two_threads_never_parse_at_once(monkeypatch):
    inside, most = 0, 0
    count = threading.Lock()
    real = compile

    def watched(*arguments, **settings):
        nonlocal inside, most
        with count:
            inside += 1
            most = max(most, inside)
        threading.Event().wait(0.001)  # lets the other threads in, if there is no lock
        result = real(*arguments, **settings)
        with count:
            inside -= 1
        return result

    monkeypatch.setattr(statements, "compile", watched, raising=False)
    with ThreadPoolExecutor(12) as pool:
        assert len(list(pool.map(statements.parse, ["x = 1"] * 12))) == 12
    assert most == 1


def test_an_error_by_a_thread_that_takes_no_lock_is_tried_again(
    monkeypatch,
):
    left = [SystemError("AST constructor recursion depth mismatch (before=139, after=79)")] * 3
    real = compile

    def disturbed(*arguments, **settings):
        if left:
            raise left.pop()
        return real(*arguments, **settings)

    monkeypatch.setattr(statements, "compile", disturbed, raising=False)
    assert ast.unparse(statements.parse("x  =  1")) == "x = 1"
    assert not left
    with pytest.raises(SyntaxError):
        statements.parse("x =")
