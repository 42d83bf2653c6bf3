"""How much of a rank's input is done, for percent and time left.

A reader is ahead of the rank: it knows the place of the last document that it handed over, and some of the documents
before that are still in work, others were finished by an attempt before. So we take the documents to be equal:

    done = what lies before the last document handed over * documents finished / documents up to that one

which is exact before the first and after the last document, and grows all the time.
"""

from __future__ import annotations

from datatrove_ckpt.checkpoint.history_records import InputPosition
from datatrove_ckpt.generation.prefetch import DocumentSource


def input_position(source: DocumentSource, first: int, finished: int) -> InputPosition:
    """How much of the input is done.

    Args:
        source: hands over the documents from number ``first`` on, counted from 0.
        finished: documents that are finished, over all attempts.
    """
    reached = source.reached()
    if reached.unit is None:
        return InputPosition()
    known = first + source.handed_over
    done, total = reached.done, reached.total
    if source.is_at_end and total is not None:
        done = total  # lines after the last document are none
    done = round(done * finished / known) if known else 0
    return InputPosition(done if total is None else min(done, total), total, reached.unit)
