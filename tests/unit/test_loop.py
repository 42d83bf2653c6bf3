"""The event loop of a run."""

from __future__ import annotations

import asyncio
import gc

import pytest

from datatrove_ckpt.process import event_loop


def test_a_signal_that_is_raised_in_the_loop_leaves_nothing_to_complain_about_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def signalled() -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(signalled())

    caplog.clear()
    gc.freeze()  # what other tests have left is none of this one's
    with pytest.raises(KeyboardInterrupt):
        event_loop.run(main())
    gc.collect()
    gc.unfreeze()
    assert "never retrieved" not in caplog.text


def test_results_and_errors_come_out() -> None:
    async def main(divisor: int) -> int:
        return 4 // divisor

    assert event_loop.run(main(2)) == 2
    with pytest.raises(ZeroDivisionError):
        event_loop.run(main(0))
