"""What several suites share, for processes that run tests.

Tests that only need files use memory, where it is there: syncs cost nothing in it.
"""

import asyncio
import functools
import gc
import inspect
import os
import shutil
import signal
import sys
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import hypothesis
import pytest
import pytest_timeout
from datatrove.io import DataFolder
from fsspec.implementations.memory import MemoryFileSystem
from loguru import _better_exceptions, logger

from datatrove_ckpt.checkpoint import files
from datatrove_ckpt.common import object_store, redaction, retrying
from datatrove_ckpt.errors import written_in
from datatrove_ckpt.generation import side_effects
from datatrove_ckpt.inference.client.client import CompletionClient, ModelServers, Outage
from datatrove_ckpt.inference.servers import host
from datatrove_ckpt.inference.servers.host import close_warm_servers
from datatrove_ckpt.output import output_folder
from datatrove_ckpt.process import event_loop, shutdown, signals
from datatrove_ckpt.testing import FakeServer
from datatrove_ckpt.user_code.code_identity import code_identity as describe
from datatrove_ckpt.user_code.statements import CodeSource
from tests import forked
from tests.clients import Sleeps
from tests.commands import Command
from tests.conftest import MEMORY
from tests.hub import FakeHub, pointed_at
from tests.stores import STORES
from tests.yaml_jobs import endpoint, job_yaml, write_job

TESTS = Path(__file__).parent
_formatter = _better_exceptions.ExceptionFormatter
# 4 ms for each test's log.
_formatter._get_lib_dirs = staticmethod(functools.cache(_formatter._get_lib_dirs))
_dump_stacks = pytest_timeout.dump_stacks
_running = []  # one test, once there is one
_SHOWN_LINES = 100  # of each log in a test's folder


def _dump_tasks(terminal):
    """A test is given up: says where the tasks of event loops wait, which the stacks of threads do
    not show.
    """
    for task in [
        found for found in gc.get_objects() if isinstance(found, asyncio.Task) and not found.done()
    ]:
        print(task, file=sys.__stderr__)
        waiting = task.get_coro()
        while getattr(waiting, "cr_frame", None) is not None:
            print(
                f"    {waiting.cr_code.co_filename}:{waiting.cr_frame.f_lineno}",
                file=sys.__stderr__,
            )
            waiting = waiting.cr_await
    _dump_stacks(terminal)
    _dump_log(getattr(_running[-1], "funcargs", {}))


def _dump_log(fixtures):
    """Prints what the test has logged, and the ends of the logs in its folders."""
    print("--- log", "".join(fixtures.get("log", ())), sep="\n", file=sys.__stderr__)
    folders = {folder for folder in fixtures.values() if isinstance(folder, Path)}
    for path in {path for folder in folders for path in folder.rglob("*.log")}:
        lines = path.read_text(errors="replace").splitlines()[-_SHOWN_LINES:]
        print(f"--- {path}", *lines, sep="\n", file=sys.__stderr__)


_parse = CodeSource.statements.func
_parsed = {}


def _statements(source):
    """Those that an earlier test has found in the same text: half of what a small run computes."""
    key = (source.path, source._documented, *source.texts.items())
    if key not in _parsed:
        _parsed[key] = _parse(source)
    return _parsed[key]


CodeSource.statements = functools.cached_property(_statements)
CodeSource.statements.__set_name__(CodeSource, "statements")
pytest_timeout.dump_stacks = _dump_tasks
# Keep no row counts: a test leaves nothing in the user's cache.
os.environ["DATATROVE_CKPT_CACHE"] = ""
forked.install()
hypothesis.settings.register_profile(
    "on a busy machine",
    deadline=None,
    # In .ci/run the same examples each time: no failure by chance.
    derandomize="DATATROVE_CKPT_NO_SKIPS" in os.environ,
    max_examples=100 if "DATATROVE_CKPT_NO_SKIPS" in os.environ else 40,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("on a busy machine")


def pytest_generate_tests(metafunc):
    """The mark ``matrix`` may hold rows, as ``parametrize`` does."""
    for mark in metafunc.definition.iter_markers("matrix"):
        if mark.args:
            metafunc.parametrize(*mark.args, **mark.kwargs)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before what -m leaves out is left out
def pytest_collection_modifyitems(items):
    """Of a test with the mark ``matrix``, all rows but the first are slow. Groups are those of
    pytest-xdist.

    It gives a test of a group a new ``_nodeid``, which pytest reads no more since 9.2
    (pytest-xdist's issue 1386): each worker would import, parse and run what one does for a whole
    group.
    """
    begun = set()
    for item in items:
        if item.get_closest_marker("matrix") is not None:
            test = item.nodeid.partition("[")[0]
            if test in begun:
                item.add_marker("slow")
            begun.add(test)
    found = yield
    for item in items:
        with_group = getattr(item, "_nodeid", item.nodeid)
        if with_group != item.nodeid:
            item._id = type(item.id).parse(with_group)  # type: ignore[attr-defined]
    return found


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Without the garbage collector, which would go through all tests again and again: a third of
    the time.
    """
    gc.disable()
    _import_in_turns(session.config)
    found = yield
    gc.enable()
    gc.set_threshold(20_000, 2, 1000)  # a full collection takes half a second
    return found


def _import_in_turns(config):
    """For workers that run all tests: each begins with another file, so that no two of them compile
    the same ones.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or [Path(folder).resolve() for folder in config.args] != [TESTS]:
        return
    modules = [
        f"tests.{path.parent.name}.{path.stem}" for path in sorted(TESTS.glob("*/test_*.py"))
    ]
    begin = len(modules) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for module in modules[begin:] + modules[:begin]:
        if not module.startswith(("tests.bench.", "tests.real.")):  # the options leave them out
            # It is reported when the file is collected.
            with suppress(Exception, pytest.skip.Exception):
                import_module(module)


def pytest_runtest_setup(item):
    _running[:] = [item]
    forked.Popen.is_allowed = item.get_closest_marker("real_process") is None


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Tests that are coroutines run in an event loop of their own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(
        pyfuncitem.obj(
            **{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        )
    )
    return True


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def policy(monkeypatch):
    """Changes rows of the table of retries: ``policy("HUB", "HUB_LOOK", first=0.01)``."""

    def change(*names, **changes):
        for name in names:
            monkeypatch.setattr(retrying, name, replace(getattr(retrying, name), **changes))

    return change


@pytest.fixture
def reraised():
    """Sets old handlers for all signals that a rank handles, and gives the signals that are raised
    again for them.
    """
    got = []
    before = {
        name: signal.signal(signal.Signals[name], lambda number, frame: got.append(number))
        for name in shutdown.SIGNALS
    }
    yield got
    for name, handler in before.items():
        signal.signal(signal.Signals[name], handler)


@pytest.fixture
def sleeps(monkeypatch):
    """A rank's clients do not wait between two attempts: only their clock moves by that time."""
    sleeps = Sleeps()
    monkeypatch.setattr(host, "ModelServers", functools.partial(ModelServers, clock=sleeps.clock))
    monkeypatch.setattr(host, "CompletionClient", functools.partial(CompletionClient, sleep=sleeps))
    return sleeps


@pytest.fixture
def answers_between(monkeypatch, sleeps):
    """The same, and another request is answered between two attempts of one."""
    answered = Outage.answered
    answers = []

    def count(outage):
        answers.append(1)
        answered(outage)

    async def sleep(seconds):
        before = len(answers)
        while len(answers) == before:
            await asyncio.sleep(0)
        await sleeps(seconds)

    monkeypatch.setattr(Outage, "answered", count)
    monkeypatch.setattr(host, "CompletionClient", functools.partial(CompletionClient, sleep=sleep))


@pytest.fixture
def command(capfd):
    """Runs a command in this process; a test that has it captures nothing else."""
    return Command(capfd)


@pytest.fixture
def said(command):
    """Runs a command on the checkpoints of a job."""
    return lambda name, folder, *options, code=0: command(
        name, folder / "checkpoints", *options, code=code
    )


@pytest.fixture
def empty_memory_file_system():
    """Nothing of another test is in fsspec's memory, nor is anything left there."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=STORES)
def store_kind(request, monkeypatch, empty_memory_file_system):
    """A row of ``STORES``, of which each store is empty."""
    kind = STORES[request.param]
    if request.param == "bucket":
        request.getfixturevalue("hub").create_repo("org/job", kind="bucket")
    if request.param == "conditions":
        monkeypatch.setattr(object_store, "CREATES_ONCE", {"memory"})
    return kind


@pytest.fixture
def real_ready_window():
    """For tests of an endpoint that does not answer at the start."""


@pytest.fixture
def code_described_once(monkeypatch):
    """For tests of hundreds of attempts with one rollout: describing its code takes a third of
    their time.
    """
    known = {}

    def code_identity(rollout_fn, shared_context, *others):
        key = id(rollout_fn), id(shared_context)
        if key not in known:  # which keeps both alive, so that no other object gets their ids
            known[key] = (
                rollout_fn,
                shared_context,
                describe(rollout_fn, shared_context),
            )
        return known[key][2]

    monkeypatch.setattr("datatrove_ckpt.generation.runner_settings.code_identity", code_identity)


@pytest.fixture
def ram(tmp_path):
    """An empty folder in memory if this machine has /dev/shm, else on disk."""
    if not MEMORY.is_dir():
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(dir=MEMORY, prefix="datatrove-ckpt-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class Log(list[str]):
    """Lines of text."""

    def said(self, text):
        """The lines with this text."""
        return [line for line in self if text in line]


@pytest.fixture(autouse=True)
def log():
    """What was logged, instead of on the terminal."""
    lines = Log()
    logger.remove()
    logger._core.patcher = None  # type: ignore[attr-defined]  # ours is for a whole process, and a test for itself
    handler = logger.add(lines.append, format="{level} {message}")
    yield lines
    with suppress(ValueError):  # datatrove's executors set up logging of their own
        logger.remove(handler)


@pytest.fixture
def server():
    with FakeServer() as running:
        yield running


@pytest.fixture
def hub(tmp_path, monkeypatch, policy):
    """A hub of this test alone, with empty caches: huggingface_hub and datasets, new processes too,
    talk to it, and this process waits for it in short pauses.
    """
    policy("HUB", "HUB_LOOK", first=0.01)
    monkeypatch.setattr(output_folder, "LAG_LOOKS", (0.0, 0.01, 0.01, 0.01, 0.01))
    with FakeHub() as running, pointed_at(running, tmp_path / "huggingface"):
        yield running


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The temporary folder of this process, which is empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def job_on_hub(here, server):
    """A folder with job.yaml, a job of two tasks and three files of org/data."""
    text = job_yaml(endpoint(server), tasks=2, output="hf://datasets/org/data/part")
    write_job(here, text + "          records_per_chunk: 2\n", ["a", "b", "c"], ["d"])


@contextmanager
def _process_as_it_was():
    """What a process has once, as a test finds it and leaves it: tests run in any order."""
    environment = dict(os.environ)
    path = list(sys.path)
    hook = sys.excepthook
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    side_effects.ROLLOUTS.effect = ""
    side_effects.SETUP.__init__()
    yield
    signals.between_ranks.restore()
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    sys.excepthook = hook
    sys.path[:] = path
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)
    # Where a loop is left behind, a signal ends its process at once.
    _loops.extend(event_loop.left_behind)  # nothing of them may be collected
    event_loop.left_behind.clear()


_loops = []


@pytest.fixture(autouse=True, scope="module")
def _module_as_if_alone():
    """Fixtures of a module run before those of its tests."""
    with _process_as_it_was():
        yield


@pytest.fixture(autouse=True)
def _as_if_alone(request, monkeypatch):
    """No test leaves its servers, its disk, open files or its words to the next."""
    # fsspec keeps one object for each name of a folder, with the first test's working directory.
    DataFolder.clear_instance_cache()
    # Keys of another test may be words of this one.
    redaction._revealed.clear()
    redaction._sent.clear()
    # Ranks would stop for the end of another test's Slurm job.
    monkeypatch.setattr("datatrove_ckpt.process.slurm_job._first_asked", {})
    # Whose fault a rejection is.
    monkeypatch.setattr("datatrove_ckpt.inference.client.client._ANSWERS_WITHIN", 0.5)
    monkeypatch.setattr("datatrove_ckpt.inference.client.client.PROBE_INTERVAL", 2.0)
    # Servers of tests send nothing unasked, but for those of test_client.py.
    monkeypatch.setattr("datatrove_ckpt.inference.client.http1.QUIET", 0.0)
    if "real_ready_window" not in request.fixturenames:
        # On a busy machine the first answer may take seconds: a small patience is for later ones.
        monkeypatch.setattr(
            "datatrove_ckpt.inference.servers.host.ready_window", lambda config: 60.0
        )
    disk = files.disk
    with written_in(""), _process_as_it_was():
        yield
    close_warm_servers()
    disk.close()
    files.disk = disk


@pytest.fixture(params=["asyncio", "uvloop"])
def over(request):
    """Runs a coroutine on each event loop."""
    if request.param == "uvloop":
        return pytest.importorskip("uvloop").run
    return asyncio.run
