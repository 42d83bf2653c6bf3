"""The house holds: each room imports only from rooms named before it, and the public names are what
they seem.
"""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import datatrove_ckpt
from datatrove_ckpt.generation.runner_settings import RunnerSettings
from datatrove_ckpt.user_code import statements
from tests.syntax import ROOMS, packed

pytestmark = pytest.mark.xdist_group("layers")  # the package is parsed once

PACKAGE = Path(datatrove_ckpt.__file__).parent
TESTS = Path(__file__).parents[1]


NOT_ROOMS = ("", "__main__", "inference", "old_paths", "run_inference", "types")
"""The command, and modules that hold names of others only."""


class Module(NamedTuple):
    imports: set[str]
    docstring: str | None
    classes: list[tuple[str, str]]
    """Their names, and the definitions of aliases."""
    writes: set[str]
    """Attributes of other objects than ``self`` that it assigns."""
    packed: list[str]


@cache
def modules():
    """Of each file what the tests need: its whole tree would stay in memory, and every collection
    would visit it.
    """
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = (
            ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            .removesuffix("__init__")
            .rstrip(".")
        )
        tree = statements.parse(path.read_text())
        nodes = list(ast.walk(tree))
        found[name] = Module(
            imports(nodes),
            ast.get_docstring(tree),
            [*class_names(tree, nodes)],
            {
                node.attr
                for node in nodes
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) != "self"
            },
            packed(nodes),
        )
    return found


def class_names(tree, nodes):
    """Yields the names of classes, private ones without their underscore, and a module's public
    aliases of types with their definitions.
    """
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_"), ""
    for node in tree.body:
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if re.match("[A-Z][a-z]", getattr(target, "id", "")):
                yield target.id, ast.unparse(node.value)


def imports(nodes):
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@cache
def own_imports(name):
    """The modules of ours that a module imports, by their names below the package."""
    prefix = "datatrove_ckpt."  # "torch" alone is not ours
    found = {
        each.removeprefix(prefix) for each in modules()[name].imports if each.startswith(prefix)
    }
    return (found & set(modules())) - {name}


def test_the_name_of_a_class_has_one_meaning():
    # A rank raises errors under their own names, as datatrove's.
    of_rank = "generation.datatrove_errors"
    # Two aliases with one definition have one meaning.
    meanings = {
        (name, definition or module)
        for module in modules()
        if module not in (of_rank, "old_paths")
        for name, definition in modules()[module].classes
    }
    times = Counter(name for name, _ in meanings)
    assert [name for name, number in times.items() if number > 1] == []
    shown = {name for name, _ in modules()[of_rank].classes} & set(times)
    assert shown <= {name for name, _ in modules()["errors"].classes}


def test_nothing_but_the_step_itself_writes_to_the_settings_of_a_user():
    settings = set(RunnerSettings.__annotations__)
    assert "checkpoints_local_dir" in settings
    writers = {
        name: module.writes & settings
        for name, module in modules().items()
        if not name.startswith("inference.")  # it knows of no step, and answers are its own word
    }
    assert {name: found for name, found in writers.items() if found} == {}


def room(name):
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "inference" else parts[0]


def test_a_room_imports_what_its_row_names_and_rows_name_only_rooms_above_them():
    rooms = {room(name) for name in modules() if name not in NOT_ROOMS}
    assert rooms <= set(ROOMS), "a module has no place in the house: add a row to ROOMS"
    above = set()
    for name, row in ROOMS.items():
        assert set(row.split()) <= above, name
        above.add(name)
        used = {
            room(i)
            for module in modules()
            if module and room(module) == name
            for i in own_imports(module)
        }
        assert used - {name} == set(row.split()), name


def test_modules_import_each_other_in_no_circle():
    waiting = {name: own_imports(name) for name in modules() if name}
    while free := [name for name, needed in waiting.items() if not needed & set(waiting)]:
        for name in free:
            del waiting[name]
    assert waiting == {}


def test_checkpoint_knows_no_network_and_no_datatrove_and_inference_no_disk_and_no_datatrove():
    for name, module in modules().items():
        roots = {imported.split(".")[0] for imported in module.imports}
        if name.startswith("checkpoint"):
            assert not roots & {"datatrove", "aiohttp", "asyncio", "fsspec"}, name
        if name.startswith("inference"):
            assert not roots & {"datatrove", "fsspec", "sqlite3"}, name


def test_the_public_names_are_there_and_no_others():
    assert set(datatrove_ckpt.__all__) == {
        "Classification",
        "CkptError",
        "InferenceConfig",
        "InferenceRunner",
        "JobsPipelineExecutor",
        "LocalPipelineExecutor",
        "MonitoringConfig",
        "SlurmPipelineExecutor",
        "InferenceError",
        "InferenceResult",
        "RolloutFunction",
        "ServerError",
        "doctor",
        "run",
    }
    seen_by_mypy = {name.rpartition(".")[2] for name in modules()[""].imports}
    assert set(datatrove_ckpt.__all__) <= seen_by_mypy
    for name in datatrove_ckpt.__all__:
        assert getattr(datatrove_ckpt, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = datatrove_ckpt.nothing


def test_every_module_says_what_its_reader_needs():
    assert [name for name, module in modules().items() if not module.docstring] == []


def test_no_statement_does_two_things():
    assert {name: module.packed for name, module in modules().items() if module.packed} == {}


@pytest.mark.parametrize(
    "form",
    [
        r"^\s*from (\.|tests\b.*\btest_)",  # what two need stands in a helper, which README names
        r"__(kw)?defaults__\W",  # a default is given, or its module's name is patched
        r"process_time\(\) .* [<>] [\d.]+$",  # a machine may be slow: compare with another time
    ],
)
def test_no_test_has_this_form(form):
    found = re.compile(form, re.MULTILINE)
    inside = [path for path in TESTS.rglob("*.py") if found.search(path.read_text())]
    assert [path.name for path in inside if path != Path(__file__)] == []
