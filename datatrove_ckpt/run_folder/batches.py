"""Cancels a batch of a run at its provider."""

import asyncio

from datatrove_ckpt.checkpoint.batch_log import Batch, give_up
from datatrove_ckpt.checkpoint.ledger import RankLedger
from datatrove_ckpt.generation.provider_passes import cancel
from datatrove_ckpt.run_folder.run_state import RankStatus
from datatrove_ckpt.run_folder.where import Place, restored, upload


def cancel_batch(place: Place, rank: RankStatus, batch: Batch) -> str | None:
    """Returns why the provider could not; "" if it could; None: it has forgotten the batch, which
    is given up.
    """
    problem = asyncio.run(cancel(batch))
    if problem is None:
        with restored(place) as changed:
            folder = changed.folder / rank.folder.relative_to(place.folder)
            give_up(folder, batch.number)
            upload(changed, [RankLedger(folder)])
    return problem
