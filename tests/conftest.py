"""What the options, the environment and the signals of a run of tests mean."""

import gc
import os
import shutil
import signal
from pathlib import Path

import pytest

from tests import waits


def _nothing(number, frame):
    """Ignores a signal as SIG_IGN does, but a program that is started from here does not inherit
    it.
    """


def _hear_all_signals():
    """Undoes what whoever started pytest did to signals; gives those that were ignored.

    nohup ignores SIGHUP, and a shell SIGINT and SIGQUIT of what it puts into the background; some
    supervisors block signals. All processes of the tests would inherit that.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    of_python = {signal.SIGPIPE, signal.SIGXFSZ}
    ignored = [
        number
        for number in signal.valid_signals() - of_python
        if signal.getsignal(number) is signal.SIG_IGN
    ]
    for number in ignored:
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    return ignored


_IGNORED = _hear_all_signals()
# Which both are read at import.
os.environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
MEMORY = Path("/dev/shm")
_NEEDED = 2 << 30  # bytes


def pytest_addoption(parser):
    parser.addoption(
        "--waits", default="1", metavar="FACTOR", help="multiply the package's own waits, as by 0.1"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """What nohup keeps from pytest, it keeps from the workers of pytest-xdist, too."""
    node.workerinput["nohup"] = signal.SIGHUP in _IGNORED


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Where everything must be there, as in .ci/run, a test that was skipped is one that failed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if (
        os.environ.get("DATATROVE_CKPT_NO_SKIPS")
        and reporter is not None
        and reporter.stats.get("skipped")
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """How many processes run the tests: two more than cores, as many tests wait; none but this for
    chosen tests.
    """
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        return 0
    return (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ) + 2


def pytest_unconfigure():
    gc.freeze()  # pytest collects garbage several times at its end, half a second each


def pytest_configure(config):
    """The folders of quick tests are in memory, where there is enough: disks take milliseconds for
    each sync. Without ``tests/fixtures.py``, the process that hands tests out starts in no time.
    """
    quick = "not slow" in config.option.markexpr
    if quick and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > _NEEDED:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    if getattr(config, "workerinput", {"nohup": signal.SIGHUP in _IGNORED})["nohup"]:
        signal.signal(signal.SIGHUP, _nothing)
    os.environ[waits.VARIABLE] = config.option.waits
    waits.shorten()
    if hasattr(config, "workerinput") or getattr(config.option, "dist", "no") == "no":
        config.pluginmanager.import_plugin("tests.fixtures")


_COUNTING = ("tests/crash/", "tests/integration/test_kills.py", "tests/integration/test_people.py")


def pytest_terminal_summary(terminalreporter):
    """How much was tried: what the tests say that count it. With ``-s`` they say it as they go."""
    passed = [
        report
        for report in terminalreporter.stats.get("passed", ())
        if report.nodeid.startswith(_COUNTING)
    ]
    lines = [
        f"{report.nodeid.rpartition('::')[2]}: {line}"
        for report in passed
        for line in report.capstdout.splitlines()
    ]
    if lines:
        terminalreporter.section("tried, and nothing lost or written twice")
        terminalreporter.write("\n".join(lines) + "\n")
