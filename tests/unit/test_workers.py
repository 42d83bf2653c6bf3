"""Our worker processes, with tasks that have nothing to do with documents."""

import asyncio
import os
import select
import signal
import sys
import threading
import time
from functools import partial

import multiprocess
import pytest

from datatrove_ckpt.common.counts import Processed
from datatrove_ckpt.errors import CkptError, UnexpectedExit, WorkerDied
from datatrove_ckpt.process import workers as module
from datatrove_ckpt.process.screen import RankProgress, RunProgress, Screen, reporter
from datatrove_ckpt.process.workers import Workers
from tests.patience import Patience, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and needs pidfd")
NUMBERS = (signal.SIGTERM, signal.SIGINT)
METHODS = [
    "fork",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("forkserver", "spawn")),
]


def in_a_worker(run, slot, tasks):
    for task in iter(tasks.next, None):
        tasks.done(task, run(slot, task))


def group(run, count=2, method="fork", **settings):
    work = partial(in_a_worker, run)
    return Workers(multiprocess.get_context(method), count, work, NUMBERS, 2, **settings)


@pytest.mark.parametrize("stop", [False, True])
def test_where_ranks_stand_is_shown_and_a_parent_that_does_not_listen_holds_up_nobody(
    stop,
):
    def run(slot, task):
        report = reporter()
        for number in range(350 if stop else 10):  # more than a pipe holds
            report(task, RankProgress(slot, number + 1, Processed(number + 1)))
        return task

    screen = Screen(RunProgress(3), 3600)
    with group(run) as workers:
        workers.screen = screen
        done = workers.run(range(3))
        if stop:
            next(done)  # nobody reads the pipes until the next one
        assert len(list(done)) == 3 - stop
    assert reporter() is None
    if not stop:
        assert (screen.progress.documents, screen.progress.work.documents) == (30, 30)


def square(slot, task):
    return task * task


@pytest.mark.parametrize("tasks", [0, 2])
def test_no_more_processes_are_started_than_there_are_tasks_and_a_large_result_comes_whole(
    tasks,
):
    with group(lambda slot, task: (os.getpid(), b"x" * 3_000_000), 5) as workers:
        done = [value for _, value in workers.run(range(tasks))]
    assert len({pid for pid, _ in done}) <= tasks
    assert [len(value) for _, value in done] == [3_000_000] * tasks


def several(work, count=1, passes=None):
    """Workers that take several tasks before one is done."""
    return Workers(multiprocess.get_context("fork"), count, work, NUMBERS, 2, screen=passes)


class Passes:
    """Stands in for the screen: counts, for all processes, how often tasks were handed out."""

    has_bar = False

    def __init__(self):
        self._number = multiprocess.get_context("fork").RawValue("i", 0)

    def tick(self):
        self._number.value += 1

    async def has_come(self, waiting):
        """Whether a worker that waits for a task gets one when tasks are handed out."""
        await asyncio.sleep(0)  # it waits now
        begun = self._number.value
        while not waiting.done() and self._number.value < begun + 2:
            await asyncio.sleep(0.001)
        for _ in range(10):  # what was sent is read
            await asyncio.sleep(0)
        return waiting.done()


@pytest.fixture
def passes(monkeypatch):
    monkeypatch.setattr(module, "TICK_SECONDS", 0.01)
    return Passes()


def test_the_tasks_of_a_worker_that_dies_are_tried_alone_and_only_a_death_alone_counts(
    tmp_path,
):
    """Task 1 kills its process. The first worker has three tasks then."""

    def work(slot, tasks):
        mine = [tasks.next()]
        if not (tmp_path / "first").exists():
            (tmp_path / "first").touch()
            mine += [tasks.next(), tasks.next()]
        while mine != [None]:
            with (tmp_path / "tried").open("a") as file:
                file.write(f"{mine}\n")
            if 1 in mine:
                os.kill(os.getpid(), signal.SIGKILL)
            (task,) = mine
            tasks.done(task, os.getpid())
            mine = [tasks.next()]

    with several(work) as workers:
        done = dict(workers.run(range(4)))
    assert sorted(done) == [0, 2, 3]
    assert workers.lost.keys() == {1}
    assert "was ended by SIGKILL" in workers.lost[1]
    tried = (tmp_path / "tried").read_text().splitlines()
    assert tried == ["[0, 1, 2]", "[3]", "[0]", "[1]", "[2]", "[1]"]


def test_a_task_that_is_tried_alone_has_no_neighbour(tmp_path, passes):
    """The process that has one is ready for more, and there is more."""

    def work(slot, tasks):
        if not (tmp_path / "first").exists():
            (tmp_path / "first").write_text(f"{tasks.next()} {tasks.next()}")
            os._exit(1)
        asyncio.run(takes_what_comes(tasks, passes, {0}, {1}, {2, 3, 4, 5}))

    with several(work, passes=passes) as workers:
        done = dict(workers.run(range(6)))
    assert (tmp_path / "first").read_text() == "0 1"
    assert done == {
        0: {0},
        1: {1},
        2: {2, 3, 4, 5},
        3: {2, 3, 4, 5},
        4: {2, 3, 4, 5},
        5: {2, 3, 4, 5},
    }


async def takes_what_comes(tasks, passes, *wanted):
    """Takes tasks until it has one of these sets and is given no more; ends what it has."""
    while (task := await tasks.wait_for_next()) is not None:
        mine = {task}
        waiting = asyncio.create_task(tasks.wait_for_next())
        while mine not in wanted or await passes.has_come(waiting):
            more = await waiting
            if more is None:
                break
            mine.add(more)
            waiting = asyncio.create_task(tasks.wait_for_next())
        for task in mine:
            tasks.done(task, mine)
        waiting.cancel()
        await asyncio.wait([waiting])


def test_a_worker_that_waits_beside_its_task_leaves_one_for_the_other_and_gets_none(
    tmp_path, passes
):
    def work(slot, tasks):
        async def one():
            task = await tasks.wait_for_next()
            waiting = asyncio.create_task(tasks.wait_for_next())
            assert not await passes.has_come(waiting)
            (tmp_path / f"{slot} waits").touch()
            until((tmp_path / "1 waits").exists)
            tasks.done(task, slot)
            assert await waiting is None

        if slot:
            until((tmp_path / "0 waits").exists)
        asyncio.run(one())

    with several(work, 2, passes) as workers:
        assert sorted(slot for _, slot in workers.run(range(2))) == [0, 1]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_task_that_comes_after_the_signal_is_not_started_and_given_back(tmp_path, is_async):
    def work(slot, tasks):
        if not (tmp_path / "signalled").exists():
            (tmp_path / "signalled").touch()
            signal.raise_signal(signal.SIGTERM)
        task = asyncio.run(tasks.wait_for_next()) if is_async else tasks.next()
        if task is not None:
            tasks.done(task, "done")

    with several(work) as workers:
        assert dict(workers.run([7])) == {7: "done"}


def test_a_task_that_is_given_back_does_not_wait_for_a_worker_that_ends(tmp_path):
    def work(slot, tasks):
        task = tasks.next()
        (tmp_path / f"{slot} has a task").touch()
        until((tmp_path / "1 has a task").exists)
        if slot and not (tmp_path / "died").exists():
            until((tmp_path / "ends").exists)
            (tmp_path / "died").touch()
            os._exit(1)
        tasks.done(task, slot)
        assert tasks.next() is None
        (tmp_path / ("again" if slot else "ends")).touch()
        until((tmp_path / "again").exists)

    with several(work, 2) as workers:
        assert sorted(slot for _, slot in workers.run(range(2))) == [0, 1]


class Stubborn(Exception):
    def __init__(self, first, second):  # so it cannot be unpickled
        super().__init__(first)


@pytest.mark.matrix(
    ("error", "kind", "said"),
    [
        (ValueError("no such key"), ValueError, "no such key"),
        (Stubborn("first", "second"), CkptError, "Task 1 failed with Stubborn: first"),
        (SystemExit(0), UnexpectedExit, r"A step of task 1 called sys.exit\(0\)"),
        (KeyboardInterrupt(), UnexpectedExit, "A step of task 1 raised KeyboardInterrupt"),
    ],
)
def test_the_first_error_is_raised_once_the_others_have_drained(tmp_path, error, kind, said):
    def run(slot, task):
        if task == 1:
            until((tmp_path / "started").exists)
            raise error
        signal.signal(signal.SIGTERM, lambda *_: (tmp_path / "drained").touch())
        (tmp_path / "started").touch()
        until((tmp_path / "drained").exists)
        return task

    with pytest.raises(kind, match=said) as caught, group(run) as workers:
        assert list(workers.run(range(6))) == [(0, 0)]
    assert (
        "in run\n" in "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        or kind is UnexpectedExit
    )
    assert not (tmp_path / "5").exists()


class Exits:
    """A task that ends each process that loads it."""

    def __call__(self, slot, task): ...

    def __reduce__(self):
        return sys.exit, (3,)


@pytest.mark.slow
def test_a_program_that_workers_cannot_import_is_an_error_and_no_endless_loop():
    said = r"(?s)No worker process could be started.*__main__"
    with group(Exits(), method="spawn") as workers, pytest.raises(WorkerDied, match=said):
        list(workers.run([1]))


def wait_for_stop(folder):
    """A task like a rank: the first signal drains it, the second one ends it."""

    def run(slot, task):
        came = []
        previous = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
        (folder / f"started {task}").touch()
        until(lambda: came)
        (folder / f"drains {task}").touch()
        until(lambda: len(came) > 1 or (folder / "drained").exists())
        signal.signal(signal.SIGTERM, previous)
        signal.raise_signal(signal.SIGTERM)
        return "not reached"

    return run


def until_there(*paths):
    until(lambda: all(path.exists() for path in paths))


def in_thread(*steps):
    thread = threading.Thread(target=lambda: [step() for step in steps])
    thread.start()
    return thread


@pytest.mark.parametrize("second", [False, True])
def test_one_signal_lets_all_tasks_drain_and_a_second_one_ends_them(tmp_path, monkeypatch, second):
    # Else a busy machine would make two events of one.
    monkeypatch.setattr(module, "SAME_EVENT", 600.0)

    receive = Workers._receive
    received = []

    def count(workers, number):
        receive(workers, number)
        received.append(number)

    monkeypatch.setattr(Workers, "_receive", count)

    def signal_again():
        os.kill(os.getpid(), signal.SIGTERM)  # of the same event
        until(lambda: len(received) == 2)
        if second:
            monkeypatch.setattr(module, "SAME_EVENT", 0.0)
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            (tmp_path / "drained").touch()

    thread = in_thread(
        lambda: until_there(tmp_path / "started 0", tmp_path / "started 1"),
        lambda: os.kill(os.getpid(), signal.SIGTERM),
        lambda: until_there(tmp_path / "drains 0", tmp_path / "drains 1"),
        signal_again,
    )
    before, children = signal.getsignal(signal.SIGTERM), multiprocess.active_children()
    with group(wait_for_stop(tmp_path)) as workers:
        list(workers.run(range(5)))
    thread.join()
    assert workers.signal == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    assert not (tmp_path / "started 2").exists()
    assert multiprocess.active_children() == children


def test_a_signal_that_another_thread_gets_is_noticed_at_once(tmp_path):
    """The kernel gives a signal to any thread. The main thread's wait for pipes is not interrupted
    by it then.

    The same is so when it comes just before the wait: Python has looked for signals, and does not
    look again.
    """
    workers = group(wait_for_stop(tmp_path))
    was_noticed = []

    def signal_this_thread():
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        patience = Patience(20)
        while not (noticed := workers.signal > 0) and not patience.over():
            time.sleep(0.001)
        was_noticed.append(noticed)
        if not noticed:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

    thread = in_thread(
        lambda: until_there(tmp_path / "started 0", tmp_path / "started 1"),
        signal_this_thread,
        (tmp_path / "drained").touch,
    )
    with workers:
        list(workers.run(range(5)))
    thread.join()
    assert was_noticed == [True]


@pytest.mark.parametrize("seconds, signals", [(600.0, 2), (0.3, 1)])
def test_a_task_that_ignores_everything_is_killed_after_the_second_signal_or_in_the_end(
    tmp_path, monkeypatch, seconds, signals
):
    monkeypatch.setattr(module, "SAME_EVENT", 0.0)
    monkeypatch.setattr(module, "_AFTER_SECOND_SIGNAL", 0.3)

    def run(slot, task):
        for number in NUMBERS:
            signal.signal(number, signal.SIG_IGN)
        (tmp_path / "started").touch()
        while True:
            signal.pause()

    workers = group(run, stop_seconds=seconds)
    steps = [
        lambda: os.kill(os.getpid(), signal.SIGTERM),
        # Two that wait together are one to Python.
        lambda: until(lambda: workers.signal),
    ]
    thread = in_thread(lambda: until_there(tmp_path / "started"), *steps * signals)
    with workers:
        list(workers.run([0]))
    thread.join()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("moment", range(4))
def test_a_signal_while_workers_are_started_leaves_none(method, moment, monkeypatch):
    """At each moment around two starts; among them is that when a process runs and nobody knows its
    number.
    """
    context = multiprocess.get_context(method)
    original, moments = context.Process.start, iter(range(100))

    def pass_by():
        if next(moments) == moment:
            os.kill(os.getpid(), signal.SIGTERM)

    def start(process):
        pass_by()
        original(process)
        pass_by()

    monkeypatch.setattr(context.Process, "start", start)
    children = multiprocess.active_children()
    with group(square, method=method) as workers:
        list(workers.run(range(4)))
    assert workers.signal == signal.SIGTERM
    assert multiprocess.active_children() == children


def test_signals_that_this_process_ignores_stay_ignored():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for `command &` in a script
    try:
        with group(lambda slot, task: signal.getsignal(signal.SIGINT) is signal.SIG_IGN) as workers:
            os.kill(os.getpid(), signal.SIGINT)
            assert dict(workers.run([1])) == {1: True}
        assert not workers.signal
    finally:
        signal.signal(signal.SIGINT, previous)


def test_workers_are_in_a_process_group_of_their_own_and_what_they_fork_has_default_handlers():
    def run(slot, task):
        if (fork := os.fork()) == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        return (
            os.getpgid(0),
            os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]),
            signal.pthread_sigmask(0, []),
        )

    with group(run) as workers:
        (done,) = dict(workers.run([1])).values()
    assert done[0] != os.getpgid(0)
    assert done[1:] == (-signal.SIGTERM, set())


@pytest.mark.slow
def test_a_thread_that_a_task_left_behind_keeps_nobody_waiting(
    monkeypatch,
):
    monkeypatch.setattr(module, "_TO_EXIT", 0.2)

    def run(slot, task):
        threading.Thread(target=threading.Event().wait).start()
        return task

    with group(run) as workers:
        assert dict(workers.run([1])) == {1: 1}


def run_two_workers(folder):
    def run(slot, task):
        (folder / str(slot)).write_text(str(os.getpid()))
        time.sleep(600)

    with group(run) as workers:
        list(workers.run(range(2)))


def test_no_worker_outlives_its_parent(tmp_path):
    # Not a fork of this process: if anything raised there, it would go on as a second pytest.
    context = multiprocess.get_context("forkserver")
    parent = context.Process(target=run_two_workers, args=(tmp_path,))
    parent.start()
    until(lambda: len([path for path in tmp_path.iterdir() if path.read_text()]) > 1)
    handles = [os.pidfd_open(int(path.read_text())) for path in tmp_path.iterdir()]
    parent.kill()
    parent.join()
    for handle in handles:
        assert select.select([handle], [], [], 120)[0]
        os.close(handle)


def environment(slot, task):
    return os.environ.get("OF_THE_PARENT", "nothing")


@pytest.mark.parametrize("method", METHODS)
def test_workers_have_the_environment_of_now(method, monkeypatch):
    for value in ("first", "second"):  # a fork server keeps that of its own start
        monkeypatch.setenv("OF_THE_PARENT", value)
        with group(environment, method=method) as workers:
            assert dict(workers.run([1])) == {1: value}
    monkeypatch.delenv("OF_THE_PARENT")
    with group(environment, method=method) as workers:
        assert dict(workers.run([1])) == {1: "nothing"}
