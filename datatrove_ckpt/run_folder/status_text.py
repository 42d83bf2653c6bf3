"""The sums of a run as lines of text: ``status`` prints them, and a report begins with them."""

import datetime
from collections.abc import Iterator, Mapping
from typing import get_args

from datatrove_ckpt.checkpoint.batch_log import Batch, read_batches
from datatrove_ckpt.checkpoint.layout import BATCHES
from datatrove_ckpt.checkpoint.rank_summary import describe_chunk, most_common_causes
from datatrove_ckpt.common import BATCH
from datatrove_ckpt.common.counts import DocumentCounts, WorkCounts
from datatrove_ckpt.common.formatting import duration, figure, percent, plural, ranges, short
from datatrove_ckpt.run_folder.estimate import estimate
from datatrove_ckpt.run_folder.run_state import RankState, RankStatus, RunState, Totals

SORTING = (
    "Sort the input before the run begins. In the short form, for the COLUMN that prompts begin "
    "with: input: {sql: \"select * from 'FILE' order by COLUMN\"}"
)
_MAX_CAUSES = 5
_MAX_WORKERS = 20
_LEAST_SHARED = 0.1


def status_lines(state: RunState) -> Iterator[tuple[str, str]]:
    return ((topic, text) for topic, text in _all_lines(state) if text)


def _all_lines(state: RunState) -> Iterator[tuple[str, str]]:
    totals = state.together
    done = totals.done
    yield "documents", _documents(state, totals)
    if totals.started is not None:
        yield from _of_attempts(state, totals)
    yield "limits", "; ".join(state.limits.described(state.run_totals))
    sampled = state.samples
    if sampled.work.requests:
        text = f"{sampled.at_least}{counted(sampled.work.requests, 'request')}"
        yield "samples", ", ".join(filter(None, [text, sampled.paid]))
    yield "prefix cache", _prefix_cache(totals.work, sampled.work)
    yield "answers", f"{_answers(done)}{done.bad_answers}".strip()
    yield "skipped", totals.skipped.text
    if done.dead > 0:
        yield "dead", _dead(state, totals)
    for rank, batch in open_batches(state):
        yield "batches", describe_batch(rank, batch, state.read_at)
    if state.missing:
        yield "missing", f"not started: {ranges(state.missing)}"
    if state.gone:
        advice = "`run` restores them from the mirror, or refuses"
        yield "", f"removed, though they had begun: {ranges(state.gone)}; {advice}"
    if state.foreign:
        ranks = f"{plural(state.tasks, 'task')}: {ranges(state.foreign)}"
        yield "foreign", f"folders beyond the run's {ranks}, which are not counted"
    yield from _workers(state)
    if state.retries:
        retried = state.retried
        text = (
            f"{counted(retried.documents, 'dead letter')} retried, {retried.counts.written:,} "
            "of them written"
        )
        if retried.states["running"]:
            text = f"{text}; {plural(retried.states['running'], 'task')} at work"
        yield "retries", text


def _of_attempts(state: RunState, totals: Totals) -> Iterator[tuple[str, str]]:
    """Numbers with a line of their own come behind the others."""
    work = totals.work
    lines = {topic: ", ".join(texts) for topic, texts in totals.lines().items()}
    yield "rate", _rate(totals)
    yield "tokens", _tokens(totals)
    yield "requests", _requests(totals)
    yield "in flight", _in_flight(state, totals)
    yield "wasted", lines.pop("wasted", "")
    if work.restarts:
        yield "servers", counted(work.restarts, "restart")
    if work.errors:
        errors = [_named_counts(work.errors)]
        errors += [f"{count:,} at {name}" for name, count in work.endpoint_errors.most_common()]
        yield "errors", "; ".join(errors) + _ago(state)
    calls = []
    for name, number in work.calls.most_common():
        text = f"{number:,} {name} ({duration(work.call_milliseconds[name] / 1000)}"
        if failed := work.failed_calls[name]:
            text += f", {failed:,} failed"
        calls.append(f"{text})")
    if calls:
        yield "calls", totals.at_least + ", ".join(calls)
    if lines.pop("paid", "") or totals.paid:
        yield "paid", totals.paid + _whole_cost(state) + _ago(state)
    yield from lines.items()
    yield "attempts", _attempts(totals)


def open_batches(state: RunState) -> Iterator[tuple[RankStatus, Batch]]:
    for rank in state.all_ranks:
        if (rank.folder / BATCHES).exists():
            for batch in read_batches(rank.folder)[0].values():
                if batch.is_open:
                    yield rank, batch


def describe_batch(rank: RankStatus, batch: Batch, now: float) -> str:
    return (
        f"{batch.id or f'number {batch.number}'} of task {rank.rank}: "
        f"{plural(batch.requests, 'request')}, {batch.state} "
        f"{duration(max(1.0, now - batch.at))} ago"
    )


def _workers(state: RunState) -> Iterator[tuple[str, str]]:
    topic = "workers"
    for worker in state.workers[:_MAX_WORKERS]:
        if worker.runs_all:
            claimed = "all tasks"
        elif worker.ranks:
            claimed = f"{plural(len(worker.ranks), 'task')}: {ranges(worker.ranks)}"
        else:
            claimed = "no task"
        if not worker.is_alive:
            claimed = f"gone, and left {claimed}"
        yield topic, f"{worker.process}: {claimed}"
        topic = ""
    omitted = state.workers[_MAX_WORKERS:]
    if omitted:
        yield (
            "",
            f"{len(omitted)} more, with "
            f"{plural(sum(len(worker.ranks) for worker in omitted), 'task')}",
        )
    for rank, cause in sorted(state.given_up.items()):
        yield "given up", f"task {rank}: {cause}"


def ranks_of(state: RunState) -> str:
    not_started = state.totals.not_started
    states = [
        f"{state.totals.states[name]} {name}"
        for name in get_args(RankState)
        if state.totals.states[name]
    ]
    if not_started:
        states.append(f"{not_started} not started")
    return f"{plural(len(state.ranks) + not_started, 'task')} ({', '.join(states)})"


def age(state: RunState) -> str:
    if state.newest is None:
        return "last change not known"
    text = f"last change {duration(max(1.0, state.read_at - state.newest))} ago"
    if state.is_copy:
        text = f"{text}, as its mirror shows"
    return text


def _ago(state: RunState) -> str:
    seconds = state.read_at - (state.together.as_of or state.read_at)
    if seconds < 1:
        return ""
    return f" as of {duration(round(seconds))} ago"


def progress_of(state: RunState) -> str:
    totals = state.totals
    share = totals.position.share
    if state.is_finished:
        return "finished"
    if share is None:
        return "the input's size is not known"
    done = f"{percent(share)} of the input{_ago(state)}"
    if totals.total_is_estimated:
        done = f"about {done}"
    if not totals.states["running"]:
        return f"{done}, {'between two tasks' if state.is_at_work else 'nothing runs'}"
    if totals.time_left is None:
        return f"{done}, time left not known yet"
    end = datetime.datetime.fromtimestamp(state.read_at + totals.time_left).astimezone()
    remaining = f"about {duration(totals.time_left)} left, until {end:%a %d %b %H:%M}"
    if totals.halted:
        remaining = f"{remaining}, not counting {plural(totals.halted, 'task')} without progress"
    return f"{done}, {remaining}"


def _documents(state: RunState, totals: Totals) -> str:
    done = totals.done
    if state.is_finished and not done.read:
        return "none in the input"
    written = f"{totals.counts.written:,} written in {counted(totals.chunks, 'chunk')}"
    if totals.rows:
        written += f" as {counted(totals.rows, 'row')}"
    text = f"{done.read:,} done: {written}, {done.dropped:,} dropped, {done.dead:,} dead"
    if totals.unfinished_chunks:
        more = (
            f"{totals.unfinished.written:,} in "
            f"{counted(totals.unfinished_chunks, 'unfinished chunk')}"
        )
        if not totals.exact:
            more = f"about {more}"
        text = f"{text}, {more}"
    return text


def _prefix_cache(run: WorkCounts, samples: WorkCounts) -> str:
    """Warns if engines find at most half as much of the prompts as in samples."""
    if not 0 < samples.prefix_queries <= run.prefix_queries:
        return ""
    share = run.prefix_hits / run.prefix_queries
    in_samples = samples.prefix_hits / samples.prefix_queries
    if share > in_samples / 2 or in_samples < _LEAST_SHARED:
        return ""
    return (
        f"gave {percent(share)} of the prompts' tokens, and {percent(in_samples)} in samples. "
        f"{SORTING}"
    )


def _answers(done: DocumentCounts) -> str:
    texts = []
    if done.endings:
        texts.append(_named_counts(done.endings))
    median, p95 = done.lengths.percentiles.values()
    if p95:
        texts.append(f"completion tokens p50 {short(median)}, p95 {short(p95)}")
    if not texts:
        return ""
    return f"{'; '.join(texts)}."


def counted(number: int, noun: str) -> str:
    return f"{number:,} {plural(number, noun).partition(' ')[2]}"


def _rate(totals: Totals) -> str:
    average = f"{figure(totals.average.documents)} documents/s on average over"
    text = f"{average} {duration(totals.working_seconds)} at work"
    if not totals.states["running"]:
        return text
    if totals.as_of is None and not totals.rates.documents:
        return f"no rate yet; {text}"
    return f"{figure(totals.rates.documents)} documents/s now; {text}"


def _tokens(totals: Totals) -> str:
    done = totals.done
    text = (
        f"{short(done.prompt_tokens)} prompt and {short(done.completion_tokens)} completion tokens"
    )
    if totals.states["running"]:
        rates = totals.rates
        text = (
            f"{text}; {figure(rates.prompt_tokens)} and {figure(rates.completion_tokens)} per "
            "second now"
        )
    return text


def _requests(totals: Totals) -> str:
    work = totals.work
    sent = f"{totals.at_least}{work.sent:,} sent, "
    if BATCH in work.tiers:
        sent += f"{work.tiers[BATCH]:,} answered in batches, "
    sent += f"{work.cached:,} answered from cache"
    return f"{totals.done.requests:,} of documents that are done; {sent}"


def _in_flight(state: RunState, totals: Totals) -> str:
    """Describes requests in flight, without ranks in their first second, which are unknown."""
    running = [
        rank for rank in state.all_ranks if rank.state == "running" and rank.as_of is not None
    ]
    if not running:
        return ""
    text = f"{totals.in_flight:,}, {totals.waiting:,} waiting{_ago(state)}"
    longest = max(running, key=lambda rank: rank.wait.oldest)
    if longest.wait.oldest:
        text += (
            f"; the oldest for {duration(longest.wait.oldest)}: "
            f"{describe_chunk(longest.root, longest.rank)}"
        )
    if longest.wait.document:
        text += f" (document {longest.wait.document})"
    return text


def _named_counts(numbers: Mapping[str, int]) -> str:
    return ", ".join(
        f"{count:,} {name}" for name, count in most_common_causes(numbers, _MAX_CAUSES).items()
    )


def _whole_cost(state: RunState) -> str:
    totals = state.totals
    position = totals.position
    ranks = [rank for rank in state.ranks if rank.position.done]
    paid = [rank.work.cost / 1e9 for rank in ranks]
    if not sum(paid) or position.total is None or position.share == 1.0:
        return ""
    done = [rank.position.done for rank in ranks]
    whole = estimate(paid, done, position.total)
    not_paid = max(0, totals.done.requests - totals.work.requests)
    of_samples = min(state.sampled.requests, not_paid)
    factor = 1 + of_samples / max(1, totals.work.requests)
    return f"; {whole.text(figure, factor)} for the whole input"


def _attempts(totals: Totals) -> str:
    text = f"{totals.number_of_attempts:,}"
    at_least = ""
    if totals.killed:
        text = f"{text}, {totals.killed:,} of them killed"
        at_least = "at least "
    return f"{text}; {at_least}{duration(totals.seconds)} together"


def _dead(state: RunState, totals: Totals) -> str:
    text = f"{totals.done.dead:,}"
    if state.causes:
        text = f"{text}: {_named_counts(state.causes)}"
    if totals.unfinished.dead:
        text = f"{text}; {totals.unfinished.dead:,} in unfinished chunks"
    return text
