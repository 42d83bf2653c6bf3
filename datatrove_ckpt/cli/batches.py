"""``datatrove-ckpt batches``: lists the batches of a run at a provider, and cancels them."""

import argparse

from datatrove_ckpt.cli.printing import say
from datatrove_ckpt.cli.what import place_of
from datatrove_ckpt.run_folder import topics
from datatrove_ckpt.run_folder.run_state import read_run_state, wanted_files


def batches(arguments: argparse.Namespace) -> int:
    with place_of(arguments, wanted_files) as place:
        state = read_run_state(place)
        found = list(topics.open_batches(state))
        for rank, batch in found:
            say(topics.describe_batch(rank, batch, state.read_at))
        if not found:
            say("No batch is open.")
        if arguments.action == "list" or not found:
            return 0
        from datatrove_ckpt.run_folder.batches import cancel_batch  # slow to import

        problems = []
        for rank, batch in found:
            problem = cancel_batch(place, rank, batch)
            if problem is not None:
                problems.append(problem)
                continue
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
