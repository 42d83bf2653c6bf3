"""What gets installed: every imported package is declared, and type checkers see an editable
install.
"""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions, version
from itertools import chain
from pathlib import Path

import pytest

import datatrove_ckpt
from datatrove_ckpt.user_code import statements
from tests import processes

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Not installed with this package: engines in environments of their own, and whoever asks for a
# pandas table has pandas.
_OF_OTHERS = {"pandas", "sglang", "torch", "torchdata"}
_FOR_TYPE_CHECKERS = {"_typeshed"}
# By whom a package comes that may be missing here.
_FROM = {"mlflow": ["mlflow-skinny"]}


def normalized(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def declared():
    lines = [
        *PROJECT["dependencies"],
        *(line for extra in PROJECT["optional-dependencies"].values() for line in extra),
    ]
    return {normalized(re.match(r"[\w.-]+", line)[0]) for line in lines}


def imported():
    """The top-level packages that the package imports, anywhere in it."""
    found = set()
    for path in Path(datatrove_ckpt.__file__).parent.rglob("*.py"):
        for node in ast.walk(statements.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"datatrove_ckpt"}


def test_what_is_imported_is_declared_and_a_plain_dependency_is_imported():
    distributions, found = packages_distributions(), imported()
    by_name = {
        name: {normalized(one) for one in distributions.get(name, _FROM.get(name, [name]))}
        for name in found
    }
    assert {
        name for name in found - _OF_OTHERS - _FOR_TYPE_CHECKERS if not declared() & by_name[name]
    } == set()
    plain = {normalized(re.match(r"[\w.-]+", line)[0]) for line in PROJECT["dependencies"]}
    assert plain <= set().union(*by_name.values())


def test_each_requirement_has_a_lower_bound():
    lines = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    assert [line for line in lines if not re.search(r">=\d|^datatrove-ckpt\[", line)] == []


def test_the_package_has_code_and_its_data_only():
    files = {path for path in Path(datatrove_ckpt.__file__).parent.rglob("*") if path.is_file()}
    endings = {path.suffix for path in files if path.parent.name != "__pycache__"}
    assert endings == {".py", ".html", ".sql", ".typed"}


def test_the_version_is_the_installed_one():
    assert version("datatrove-ckpt") == datatrove_ckpt.__version__


@pytest.mark.slow
def test_a_type_checker_finds_the_package_outside_its_checkout(tmp_path):
    (tmp_path / "job.py").write_text(
        "from datatrove_ckpt import InferenceConfig, run\n"
        "from datatrove_ckpt.rollouts import Document, Generate\n"
        "reveal_type(InferenceConfig('dummy', 'm'))\n"
        "async def rollout(document: Document, generate: Generate) -> str:\n"
        "    reveal_type(document.text)\n"
        "    answer = await generate({'messages': document.txt})\n"
        "    reveal_type(answer.finish_reason)\n"
        "    return answer.usage\n"
        "run(input='documents', rollout=rollout, model='m', run_folder='x')\n"
    )
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--follow-imports=silent",
        f"--cache-dir={tmp_path / 'cache'}",
        "job.py",
    ]
    checked = processes.run(command, cwd=tmp_path)
    found = [line.partition(": ")[2] for line in checked.stdout.splitlines()]
    assert found[:5] == [
        'note: Revealed type is "datatrove_ckpt.config.inference_config.InferenceConfig"',
        'note: Revealed type is "str"',
        'error: "Document" has no attribute "txt"; maybe "text"?  [attr-defined]',
        'note: Revealed type is "str"',
        'error: Incompatible return value type (got "dict[str, Any]", expected "str")  [return-value]',
    ]
