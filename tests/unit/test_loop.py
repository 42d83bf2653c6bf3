"""The event loop of a run."""

from __future__ import annotations

import asyncio
import gc

import pytest

from datatrove_ckpt.process import event_loop


@pytest.mark.parametrize("starts_processes", [True, False])
def test_a_signal_that_is_raised_in_the_loop_leaves_nothing_to_complain_about_later(
    starts_processes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def signalled() -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(signalled())

    with pytest.raises(KeyboardInterrupt):
        event_loop.run(main(), starts_processes)
    gc.collect()
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("starts_processes", [True, False])
def test_results_and_errors_come_out(starts_processes: bool) -> None:
    async def main(divisor: int) -> int:
        return 4 // divisor

    assert event_loop.run(main(2), starts_processes) == 2
    with pytest.raises(ZeroDivisionError):
        event_loop.run(main(0), starts_processes)


@pytest.mark.parametrize("starts_processes", [True, False])
def test_an_interruption_inside_main_comes_out_as_it_is(starts_processes: bool) -> None:
    class Signalled(KeyboardInterrupt):
        pass

    async def main() -> None:
        raise Signalled

    with pytest.raises(Signalled):
        event_loop.run(main(), starts_processes)
