"""``datatrove-ckpt batches``: lists the batches of a run at a provider, and cancels them."""

from __future__ import annotations

import argparse
import asyncio

from datatrove_ckpt.cli.printing import say
from datatrove_ckpt.cli.what import place_of
from datatrove_ckpt.maintenance.read_state import read_run_state, wanted_files
from datatrove_ckpt.maintenance.topics import describe_batch, open_batches


def batches(arguments: argparse.Namespace) -> int:
    with place_of(arguments, wanted_files) as place:
        state = read_run_state(place)
        found = list(open_batches(state))
        for rank, batch in found:
            say(describe_batch(rank, batch, state.read_at))
        if not found:
            say("No batch is open.")
        if arguments.action == "list" or not found:
            return 0
        from datatrove_ckpt.generation.provider_passes import cancel  # slow to import

        problems = [asyncio.run(cancel(batch)) for _, batch in found]
    say(
        "\n".join(filter(None, problems))
        or "All are being canceled, and listed until the run collects them."
    )
    return int(any(problems))
