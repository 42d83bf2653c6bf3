"""``datatrove-ckpt batches``: lists the batches of a run at a provider, and cancels them."""

from __future__ import annotations

import argparse
import asyncio

from datatrove_ckpt.checkpoint.batch_log import give_up
from datatrove_ckpt.checkpoint.ledger import RankLedger
from datatrove_ckpt.cli.printing import say
from datatrove_ckpt.cli.what import place_of
from datatrove_ckpt.maintenance.read_state import read_run_state, wanted_files
from datatrove_ckpt.maintenance.topics import describe_batch, open_batches
from datatrove_ckpt.maintenance.where import restored, upload


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

        problems = []
        for rank, batch in found:
            problem = asyncio.run(cancel(batch))
            if problem is not None:
                problems.append(problem)
                continue
            with restored(place) as changed:
                folder = changed.folder / rank.folder.relative_to(place.folder)
                give_up(folder, batch.number)
                upload(changed, [RankLedger(rank.root, rank.rank, folder)])
            say(
                f"The provider has forgotten {batch.id}. It is given up: the next run sends its "
                "requests, and pays for them, again."
            )
    if problems:
        say(
            "\n".join(filter(None, problems))
            or "All are being canceled, and listed until the run collects them."
        )
    return int(any(problems))
