"""``LimitWatch`` lets documents begin by what they will probably cost: runs in virtual time, whose
costs vary by their mean, until their limit is spent.
"""

import heapq
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from datatrove_ckpt.checkpoint.run_limits import Limits, RunTotals
from datatrove_ckpt.common.counts import DocumentCounts, WorkCounts
from datatrove_ckpt.generation import limit_watch
from datatrove_ckpt.generation.limit_watch import LimitWatch, RunReader
from tests import golden

SEEDS = 20
LOOK, TICK = 0.1, 0.02
"""Seconds until a process reads the others' costs, and until a task that waits asks again."""


def document(ordinal):
    return SimpleNamespace(ordinal=ordinal, prompt_tokens=0, completion_tokens=0)


class Checkpoint:
    def __init__(self, name):
        self.folder = Path("checkpoints", name)
        self.own = WorkCounts()
        self.earlier = RunTotals()
        self.resumed = SimpleNamespace(finished=DocumentCounts())

    @property
    def totals(self):
        return self.earlier + RunTotals.of(self.own)


class Run:
    """Tasks that spend a limit. A document costs 1 in the mean.

    ``places``: of each task. ``spread``: 0 where each costs 1. ``is_slow``: long answers cost more.
    """

    def __init__(self, limit, places, seed, processes=1, tasks=1, spread=1, is_slow=False):
        self.limits = Limits(max_cost=limit)
        self.places = places
        self.chance = random.Random(seed)
        self.spread = spread
        self.is_slow = is_slow
        self.now = 0.0
        self.checkpoints = {}
        self.watches = []
        self.events = []
        self.step = SimpleNamespace(
            limits=self.limits,
            checkpoints_local_dir="checkpoints",
            checkpoints_root=Path("checkpoints"),
            checkpoints_remote_dir=None,
        )
        for process in range(processes):
            reader = RunReader(Path("checkpoints"), None)
            reader._readers = [self]
            reader.read()
            for task in range(tasks):
                name = f"{process * tasks + task:05d}"
                self.checkpoints[name] = Checkpoint(name)
                watch = LimitWatch(self.step, self.checkpoints[name], None)
                watch.reader.tasks.remove(watch)
                watch.reader = reader
                reader.tasks.add(watch)
                self.watches.append(watch)

    def read(self):
        return {name: checkpoint.totals for name, checkpoint in self.checkpoints.items()}

    def monotonic(self):
        return self.now

    @property
    def spent(self):
        cost = sum(checkpoint.own.cost for checkpoint in self.checkpoints.values())
        return cost / 1e9 / self.limits.max_cost

    def begin(self, watch):
        while len(watch.began) < self.places:
            if self.limits.spent(watch.reader.now())[0] >= 1:
                return
            ordinal = self.begun
            if not watch.affords(ordinal):
                return
            self.begun += 1
            cost = self.chance.expovariate(1) if self.spread else 1.0
            seconds = 0.1 + 0.9 * cost if self.is_slow else self.chance.uniform(0.5, 1.5)
            heapq.heappush(self.events, (self.now + seconds, ordinal, watch, cost))

    def run(self):
        """Returns the share of the places that had a document, from 2 to 90 % of the limit."""
        self.begun = 0
        busy = seconds = 0.0
        looks, ticks = LOOK, TICK
        for watch in self.watches:
            self.begin(watch)
        while self.events:
            before = self.now
            in_work = sum(len(watch.began) for watch in self.watches)
            self.now = min(self.events[0][0], looks, ticks)
            if 0.02 < self.spent < 0.9:
                busy += (self.now - before) * in_work
                seconds += self.now - before
            if self.now == looks:
                looks += LOOK
                for watch in self.watches:
                    watch.reader._next_look = 0.0
                    watch.reader.read(anew=False)
            elif self.now == ticks:
                ticks += TICK
                for watch in self.watches:
                    self.begin(watch)
            else:
                _, ordinal, watch, cost = heapq.heappop(self.events)
                own = watch.checkpoint.own
                own.requests += 1
                own.cost += round(cost * 1e9)
                watch.end(document(ordinal), True, round(cost * 1e9))
                self.begin(watch)
        return busy / max(seconds, TICK) / self.places / len(self.watches)


@pytest.mark.parametrize(
    "job",
    golden.values("simulated_limits", globals()),
    ids=str,
)
def test_a_limit_holds_and_the_places_stay_full(monkeypatch, job):
    above = 0
    busy = []
    for seed in range(SEEDS):
        run = Run(seed=seed, **job)
        monkeypatch.setattr(limit_watch, "time", run)
        busy.append(run.run())
        assert run.spent >= 1
        above += run.spent > 1.05
    assert above <= SEEDS / 20
    if job["places"] <= job["limit"] / 10:
        assert sorted(busy)[SEEDS // 2] >= 0.95


def test_a_limit_of_few_answers_is_not_overrun_by_what_begins_first(monkeypatch):
    for limit, most in ((1, 4), (5, 6), (20, 22)):
        run = Run(limit, 100, 0, spread=0)
        monkeypatch.setattr(limit_watch, "time", run)
        run.run()
        assert limit <= run.begun <= most


def test_many_tasks_cost_nothing_for_each_document(monkeypatch):
    run = Run(400, 10, 0)
    added = []
    add = RunTotals.__add__
    monkeypatch.setattr(RunTotals, "__add__", lambda *both: added.append(both) or add(*both))
    monkeypatch.setattr(limit_watch, "time", run)
    reader = run.watches[0].reader
    run.checkpoints |= {f"{number:05d}": Checkpoint(f"{number:05d}") for number in range(1, 1000)}
    for checkpoint in run.checkpoints.values():
        checkpoint.own.cost = 3
    reader._next_look = 0.0
    reader.read()
    run.watches[0].checkpoint.own.cost = 5
    added.clear()
    assert reader.now().cost == 999 * 3 + 5
    assert len(added) < 10


def test_until_the_others_are_known_documents_begin_at_what_this_process_has_spent(monkeypatch):
    """The first poll of a mirror may take minutes, and earlier attempts have spent half."""
    run = Run(400, 10, 0, spread=0)
    monkeypatch.setattr(limit_watch, "time", run)
    (watch,) = run.watches
    checkpoint = watch.checkpoint
    earlier = RunTotals(cost=200 * 10**9)
    checkpoint.earlier = earlier
    watch.reader = reader = RunReader(Path("checkpoints"), None)
    reader._readers = [run]
    reader.tasks.add(watch)
    for ordinal in range(4):
        assert watch.affords(ordinal)
    for ordinal in range(4):
        run.now += 1
        checkpoint.own.cost += 10**9
        watch.end(document(ordinal), True, 10**9)
    assert all(watch.affords(4 + number) for number in range(10))
    reader.read()
    assert reader.at_start == earlier
    assert all(watch.affords(14 + number) for number in range(5))


def test_documents_that_cost_nothing_hold_none_back(monkeypatch):
    """They may call functions, and send no request."""
    run = Run(400, 10, 0)
    monkeypatch.setattr(limit_watch, "time", run)
    (watch,) = run.watches
    assert [watch.affords(ordinal) for ordinal in range(5)] == [True] * 4 + [False]
    run.now = 1.0
    watch.end(document(0), False, 0)
    assert all(watch.affords(ordinal) for ordinal in range(10, 20))
    run.now = 3.0  # those that take longer may cost something
    assert not watch.affords(20)


def test_a_document_that_hangs_holds_no_others_back(monkeypatch):
    run = Run(400, 10, 0, spread=0)
    monkeypatch.setattr(limit_watch, "time", run)
    (watch,) = run.watches
    watch.begin(-1)
    for ordinal in range(100):
        watch.begin(ordinal)
        run.now += 10
        watch.checkpoint.own.cost += 10**9
        watch.end(document(ordinal), True, 10**9)
    run.now += 100_000
    assert all(watch.affords(100 + number) for number in range(30))


def test_documents_of_a_task_that_has_ended_hold_none_back(monkeypatch):
    """A task may end with documents in work: it failed, or a limit stopped it."""
    run = Run(400, 10, 0, tasks=2)
    monkeypatch.setattr(limit_watch, "time", run)
    ended, other = run.watches
    assert [ended.affords(ordinal) for ordinal in range(5)] == [True] * 4 + [False]
    ended.close()
    assert [other.affords(ordinal) for ordinal in range(5)] == [True] * 4 + [False]


@pytest.mark.parametrize("others, most", [(0, 450), (9, 45)])
def test_a_resume_begins_with_as_many_documents_as_earlier_attempts_show(monkeypatch, others, most):
    run = Run(1000, 10, 0)
    monkeypatch.setattr(limit_watch, "time", run)
    (watch,) = run.watches
    checkpoint = watch.checkpoint
    checkpoint.earlier = RunTotals(cost=100 * 10**9)
    checkpoint.resumed.finished = DocumentCounts(read=100)
    run.checkpoints |= {
        f"{number:05d}": Checkpoint(f"{number:05d}") for number in range(1, 1 + others)
    }
    watch.reader._next_look = 0.0
    watch.reader.read()
    begun = 0
    while watch.affords(begun):
        begun += 1
    assert begun == most
