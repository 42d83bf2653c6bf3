"""The pages agree with the code: tables, options, errors, rooms, settings, links.

The examples run in test_examples.
"""

import argparse
import ast
import inspect
import json
import re
import tomllib
from importlib.metadata import metadata, version
from pathlib import Path

from datatrove_ckpt import errors, readers
from datatrove_ckpt.checkpoint import recovery
from datatrove_ckpt.checkpoint.identity import FORMAT
from datatrove_ckpt.checkpoint.rank_summary import misplaced
from datatrove_ckpt.cli import short_form
from datatrove_ckpt.cli.main import make_parser
from datatrove_ckpt.common.counts import METRICS, DocumentCounts, WorkCounts
from datatrove_ckpt.config.inference_config import ENGINES
from datatrove_ckpt.mirror import manifests
from datatrove_ckpt.output.output_folder import file_problem
from datatrove_ckpt.readers import base
from datatrove_ckpt.run_folder import verify
from datatrove_ckpt.run_folder.run_state import RankStatus, RunState, to_json
from tests import settings_page, status_page
from tests.bench import report
from tests.pages import (
    LANGUAGES,
    ROOT,
    RUN_ELSEWHERE,
    blocks,
    commands,
    exit_codes,
    list_heads,
    pages,
    section,
    table_rows,
)
from tests.syntax import ROOMS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def codes(text):
    """What stands between backticks."""
    return re.findall(r"`([^`\n]+)`", text)


# README ------------------------------------------------------------------------------------------


def test_readmes_two_lines_are_found_by_ci_as_the_tests_find_them():
    lines = [
        line for line in pages()["README.md"].splitlines() if line.startswith("python3 -m venv")
    ]
    assert lines == commands()
    quick_start, tests = commands()
    assert quick_start.endswith(" && datatrove-ckpt run configs/quickstart.yaml")
    assert " && python -m pytest" in tests
    assert all(" && . .venv/bin/activate && " in line for line in lines), (
        "the next commands work as typed"
    )
    assert "grep '^python3 -m venv' README.md | sed -n 2p" in (ROOT / ".ci/run").read_text()


def test_readme_shows_the_figures_of_the_benchmarks():
    table = report.measured(ROOT / "docs/internals/benchmarks.md")
    assert report.measured(ROOT / "README.md") == report.summary(table)
    shares = report.measured(ROOT / "docs/internals/benchmarks.md", "shares")
    assert report.measured(ROOT / "README.md", "shares") == report.share_summary(shares)


# examples ----------------------------------------------------------------------------------------


def test_every_fence_is_an_example_in_a_language_that_tests_run():
    for name, text in pages().items():
        fences = re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE)
        assert len(fences) == 2 * len(blocks(page=name)), (
            f"{name}: a fence is indented, or has no language"
        )
    assert {block.language for block in blocks()} == set(LANGUAGES)


def test_no_command_is_indented_where_no_test_would_run_it():
    for name, text in pages().items():
        assert (
            re.findall(
                r"^ {4,}(?:\$ )?(?:datatrove-ckpt|python3?|pip|export) .*", text, re.MULTILINE
            )
            == []
        ), name


def test_no_empty_line_cuts_a_table():
    for name, text in pages().items():
        tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
        assert [table for table in tables if not re.match(r".*\n\|[-:| ]+\|\n", table)] == [], name


def test_commands_that_run_elsewhere_are_in_a_page_and_are_covered_there():
    lines = {line for block in blocks("bash") for line in block.lines}
    assert set(RUN_ELSEWHERE) <= lines
    assert "torch_example" in (ROOT / "tests/real/test_torch.py").read_text()


# links and names ---------------------------------------------------------------------------------


def anchors(text):
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_pages_that_are_read_stay_short_together():
    """The page of settings and the table of numbers are generated, and the changelog grows with
    each release: nobody reads them as a whole.
    """
    written = {name: text.partition(status_page.MARK)[0] for name, text in pages().items()}
    words = {name: len(text.split()) for name, text in written.items()}
    words = {
        name: number
        for name, number in words.items()
        if Path(name).stem not in ("settings", "changelog")
    }
    longest = sorted(words, key=words.__getitem__)[-5:]
    total = sum(words.values())
    assert total <= 32_000, (
        f"{total:,} words. Leave out as many as you add, of the same page: what stands on another "
        "page (link to it), in settings.md or in --help, and cases that nobody meets. The longest "
        f"pages: {', '.join(longest)}"
    )


def assert_leads_somewhere(home, target):
    """
    Args:
        home: the file that has the link.
    """
    path, _, anchor = target.partition("#")
    file = (home.parent / path).resolve() if path else home
    assert file.is_file(), f"{home.name}: {target}"
    if anchor:
        assert anchor in anchors(file.read_text()), f"{home.name}: {target}"


def test_links_lead_somewhere():
    for name, text in pages().items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if not target.startswith("https://"):
                assert_leads_somewhere(ROOT / name, target)


def test_links_of_the_wheels_description_lead_to_the_same_files():
    wheel = metadata("datatrove-ckpt")
    repository = PROJECT["project"]["urls"]["Repository"]
    targets = re.findall(r"\]\((.*?)\)", wheel.get_payload())
    pages_of_it = f"{repository}/blob/v{version('datatrove-ckpt')}/"
    inside = [target for target in targets if target.startswith(repository)]
    assert len(inside) > 10
    for target in inside:
        assert target.startswith((pages_of_it, pages_of_it.replace("/blob/", "/raw/")))
        assert_leads_somewhere(ROOT / "README.md", target.split("/", 7)[7])
    assert all(target.startswith(("https://", "#")) for target in targets)


def test_files_that_are_named_are_there():
    shown = {block.lines[0].removeprefix("# ") for block in blocks()}
    for path in codes("".join(pages().values())):
        if path in shown:
            continue
        if re.fullmatch(r"(configs|docs|slurm|tests|\.ci)/[\w./-]*|\w+\.yaml", path):
            assert (ROOT / path).exists() or (ROOT / "configs" / path).exists(), path
        elif re.fullmatch(r"[\w/]+/\w+\.py", path) or path == "runner.py":
            assert (ROOT / "datatrove_ckpt" / path).exists() or (ROOT / path).exists(), path


def test_every_page_can_be_reached_from_readme():
    reached, waiting = {"README.md"}, ["README.md"]
    while waiting:
        text = pages()[waiting.pop()]
        found = {
            name
            for name in pages()
            if name in text or re.search(rf"\]\((internals/)?{Path(name).name}[#)]", text)
        }
        waiting += found - reached
        reached |= found
    assert reached == set(pages())


# recovery, mirror --------------------------------------------------------------------------------


def test_the_crash_table_is_the_one_in_the_code():
    in_page = table_rows(section("docs/internals/recovery.md", "## How a chunk is committed"))
    in_code = re.findall(
        r"^    (\d) +(journal|output)(.*?)  +(\S.*)$", recovery.__doc__, re.MULTILINE
    )
    assert in_page == [
        [number, (first + rest).strip(), what] for number, first, rest, what in in_code
    ]
    assert len(in_code) == 5


# settings, errors, command line ------------------------------------------------------------------


def test_the_settings_page_is_the_one_that_the_docstrings_give():
    assert settings_page.PAGE.read_text() == settings_page.page(), (
        "run: python -m tests.settings_page"
    )


def test_the_table_of_numbers_is_the_one_that_their_declarations_give():
    assert status_page.PAGE.read_text() == status_page.page(), "run: python -m tests.status_page"
    declared = [*WorkCounts.displays().values(), *DocumentCounts.displays().values()]
    shown = {number.prometheus.partition(".")[0] for number in declared} - {""}
    assert shown <= {heading.split()[0] for heading in METRICS}


def test_the_status_page_names_keys_that_the_json_has():
    ranks = [RankStatus("", 0, Path(), "running")]
    found = json.loads(to_json(RunState("", False, 0.0, ranks=ranks)))
    known = {**found["ranks"][0], **found["totals"], **found}
    for row in table_rows(section("docs/status.md", "## JSON")):
        for key in codes(row[0]):
            node = known
            for name in key.split("."):
                node = node[name]


def test_every_error_has_an_entry_in_the_order_of_the_tree():
    entries = re.findall(
        r"^### (\w+)$", section("docs/troubleshooting.md", "## Errors"), re.MULTILINE
    )
    classes = [
        name
        for name, one in vars(errors).items()
        if inspect.isclass(one) and issubclass(one, errors.CkptError)
    ]
    assert sorted(entries) == sorted(classes)
    tree = re.findall(r"^[│├└─ ]*(\w+)(?:  |$)", errors.__doc__, re.MULTILINE)
    assert [name for name in tree if name in entries] == entries
    others = [getattr(readers, name) for name in readers.__all__]
    for error in (
        one for one in others if inspect.isclass(one) and issubclass(one, errors.CkptError)
    ):
        assert f"`{error.__name__}`" in pages()["docs/troubleshooting.md"]


def subcommands():
    (action,) = [
        one for one in make_parser()._actions if isinstance(one, argparse._SubParsersAction)
    ]
    return action.choices


def test_every_command_has_a_section_with_its_arguments_and_no_others():
    common = section("docs/cli.md", "## Commands")
    assert set(re.findall(r"\(#(\w+)\)", common)) == set(subcommands())
    for name, command in subcommands().items():
        text = section("docs/cli.md", f"## {name}")
        heads = [head for head in list_heads(text) if head.startswith("`--")]
        strings = {string for action in command._actions for string in action.option_strings}
        options = {string for string in strings if string.startswith("--")}  # -o is --output
        assert {code for head in heads for code in codes(head)} == options - {"--help"}, name
        unexplained = {code for head in heads if f"- {head}: " not in text for code in codes(head)}
        assert unexplained <= set(codes(common)), name
        for action in command._actions:
            assert action.option_strings or str(action.metavar) in text, name


def test_the_exit_codes_are_those_of_the_help():
    for name, command in subcommands().items():
        in_help = re.findall(
            r"^  (\d)  ", (command.epilog or "").partition("exit codes:\n")[2], re.MULTILINE
        )
        assert in_help, name
        assert [code for code in exit_codes(name) if code.isdigit()] == in_help, name


def test_the_kinds_of_problems_are_those_of_verify():
    rows = table_rows(section("docs/cli.md", "## verify"))
    listed = [
        code
        for row in rows
        for code in codes(row[0])
        if code.islower() and not code.startswith("--")
    ]
    sources = "".join(map(inspect.getsource, (verify, misplaced, file_problem)))
    assert set(re.findall(r'roblem\(\s*"(\w+)"', sources)) <= {*listed, "unfinished"}
    assert [kind for kind in listed if f'"{kind}"' not in sources] == []


def test_the_extras_are_those_of_the_package():
    listed = [
        code for head in list_heads(section("docs/cli.md", "## Extras")) for code in codes(head)
    ]
    others = PROJECT["project"]["optional-dependencies"].keys() - ENGINES  # these: docs/servers.md
    assert sorted(listed) == sorted(others)


# architecture, changelog, benchmarks -------------------------------------------------------------


def test_the_architecture_names_every_room_in_the_order_of_the_layers_and_its_tests():
    house = section("docs/architecture.md", "## The house")
    assert [codes(row[0])[0] for row in table_rows(house)] == list(ROOMS)
    for room, _, tests in table_rows(house):
        assert codes(tests), room
        for name in codes(tests):
            assert [*(ROOT / "tests").glob(f"*/{name}.py")], f"{room}: {name}"
    inside = {
        path.stem
        for path in (ROOT / "datatrove_ckpt").iterdir()
        if path.suffix == ".py" or path.is_dir()
    }
    named = {code.partition(".")[0] for code in codes(house)}
    assert inside - {"__pycache__"} <= named


def names_in(path):
    """The classes, functions and methods of a file."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if hasattr(part, "name")}
        if hasattr(node, "name"):
            names.add(node.name)
    return names


def assert_is_in_the_code(folder, place):
    """``place``: path::name."""
    path, _, name = place.partition("::")
    assert name in names_in(ROOT / folder / path), place


def test_each_rule_names_code_and_a_test_that_exist():
    rules = table_rows(section("docs/internals/invariants.md", "## Rules"))
    assert len(rules) >= 10
    for _, *places in rules:
        for folder, place in zip(("datatrove_ckpt", "tests"), places, strict=True):
            assert_is_in_the_code(folder, place.strip("`"))


def test_the_map_names_functions_that_exist():
    places = [code for code in codes(pages()["docs/architecture.md"]) if "::" in code]
    assert len(places) >= 20
    for place in set(places) - {"path::name"}:
        assert_is_in_the_code("datatrove_ckpt", place)


def test_the_glossary_has_sixty_words_at_most_each_a_line_and_in_order():
    glossary = section("docs/architecture.md", "## Glossary")
    lines = [line for line in glossary.splitlines() if line.startswith("- ")]
    words = [re.fullmatch(r"- \*\*(.*?)\*\*: .*", line)[1].lower() for line in lines]
    assert words == sorted(set(words))
    assert len(words) <= 60
    assert glossary.rstrip().endswith("\n".join(lines))


def test_the_readme_of_the_tests_names_each_folder_and_each_helper():
    tests = ROOT / "tests"
    folders = {path.parent.name for path in tests.glob("*/__init__.py")} | {"data", "tables"}
    helpers = {path.stem for path in tests.glob("*.py")} - {"__init__"}
    assert folders | helpers <= set(codes((tests / "README.md").read_text()))


def test_the_settings_of_the_short_form_are_listed():
    listed = [codes(head)[0] for head in list_heads(section("docs/cli.md", "## The short form"))]
    assert sorted(listed) == sorted(short_form.NAMES)


def test_what_the_how_tos_tell_to_change_is_in_the_code():
    source = "".join(path.read_text() for path in (ROOT / "datatrove_ckpt").rglob("*.py"))
    words = set(re.findall(r"\w+", source))
    page = "docs/internals/how-to-add.md"
    headings = re.findall(r"^## How to .*$", pages()[page], re.MULTILINE)
    assert len(headings) >= 9
    for heading in headings:
        for code in codes(section(page, heading)):
            name = code.partition("(")[0]
            assert name.endswith(".py") or words.issuperset(re.findall(r"\w+", name)), (
                f"{heading}: {code}"
            )


def test_the_changelog_tells_the_formats_that_the_code_writes():
    text = section("docs/changelog.md", "## The format of checkpoints")
    numbers, versions = table_rows(text)[:3], table_rows(text)[3:]
    expected = [str(FORMAT), str(manifests.FORMAT), str(base.READER_VERSION)]
    assert [row[2] for row in numbers] == expected
    (current,) = [row for row in versions if version("datatrove-ckpt") in row[0]]
    assert current[1:] == expected
    assert f"\n## {version('datatrove-ckpt')}" in pages()["docs/changelog.md"]
