"""Finds answers that are probably bad: they loop, refuse, copy their prompt or repeat an answer.

Each test takes microseconds, reads only the text, and rather misses a bad answer than accuses a
good answer: the true numbers may be higher.
"""

import re
from collections.abc import Iterable, Sequence

from loguru import logger

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.common.counts import FAULTS
from datatrove_ckpt.output.document_codec import Result
from datatrove_ckpt.rollouts.settings import is_cut_off

LOOPING, REFUSING, COPYING, REPEATING, INVALID = FAULTS
_REPEATED_TAIL = 24  # characters: shorter tails stand in texts by chance
_LOOKED_AT = 4000
_LEAST_LOOP = 200  # characters that a loop has in all
_LEAST_TURNS = 4
_LONG = 100  # characters of an answer; shorter ones, such as labels, are often the same
_KNOWN = 100_000  # hashes: 10 MB
_FIRST = 100
_BEGINNING = 200  # characters that a refusal is in
_REFUSAL = re.compile(
    r"\W*+((i['\u2019]m|i am) (really |very |so )?sorry|sorry|i apologi[sz]e|unfortunately)?\W*"
    r"(but |as an ai[^.]{0,40}, ){0,3}"
    r"(i can['\u2019]t|i cannot|i can not|i won['\u2019]t|i will not|"
    r"(i['\u2019]m|i am) (not able|unable) to)\s(\w+ ){0,2}?"
    r"(assist|help|comply|fulfil|provide|create|write|generate|continue|answer|do that|engage)",
    re.IGNORECASE,
)

_FAULT_OF = {"on_loop": LOOPING, "on_refusal": REFUSING}
_REFUSAL_REASONS = frozenset({"refusal", "content_filter"})


def is_looping(text: str) -> bool:
    tail = text[-_REPEATED_TAIL:]
    # Further back, there would be too few turns.
    before = text.rfind(tail, -min(_LOOKED_AT, len(tail) + len(text) // _LEAST_TURNS), -1)
    if before < 0:
        return False
    period = len(text) - len(tail) - before
    length = max(_LEAST_LOOP, _LEAST_TURNS * period)
    if length > len(text):
        return False
    end = text[-length:]
    return end[period:] == end[:-period]


def choices_of(answer: Result) -> Sequence[JsonObject]:
    return answer.choices or [{"text": answer.text, "finish_reason": answer.finish_reason}]


def text_of(choice: JsonObject) -> str:
    text = choice["text"]
    return text.strip() if isinstance(text, str) else ""


class AnswerQuality:
    def __init__(self, refusals: Sequence[str] = ()) -> None:
        self._refusals = [phrase.casefold() for phrase in refusals]
        self._hashes: set[int] = set()
        self._seen = 0
        self._bad = 0

    def note(self, is_bad: bool) -> None:
        if self._seen == _FIRST:
            return
        self._seen += 1
        self._bad += is_bad
        if self._seen == _FIRST and 2 * self._bad > _FIRST:
            logger.warning(
                f"{self._bad} of the first {_FIRST} answers are cut off, empty, looping, "
                "refusals, or copies: see `datatrove-ckpt run --sample 5`."
            )

    def faults(self, choice: JsonObject, text: str, prompt: str) -> list[str]:
        faults = self._clear_faults(choice, text)
        length = len(text)
        if length < _LONG:
            return faults
        if 2 * length >= len(prompt) and text in prompt:
            faults.append(COPYING)
        number = hash(text)
        if number in self._hashes:
            faults.append(REPEATING)
        elif len(self._hashes) < _KNOWN:
            self._hashes.add(number)
        return faults

    def first_case(self, settings: Iterable[str], answer: Result) -> str:
        choices = choices_of(answer)
        faults = {
            fault for choice in choices for fault in self._clear_faults(choice, text_of(choice))
        }
        if any(is_cut_off(choice["finish_reason"]) for choice in choices):
            faults.add("on_cut_off")
        return next((name for name in settings if _FAULT_OF.get(name, name) in faults), "")

    def _clear_faults(self, choice: JsonObject, text: str) -> list[str]:
        reason = str(choice["finish_reason"] or "").lower()
        faults = []
        if reason == "repetition" or is_looping(text):  # the reason of vLLM's repetition_detection
            faults.append(LOOPING)
        if (
            _REFUSAL.match(text, 0, _BEGINNING)
            or reason in _REFUSAL_REASONS
            or choice.get("refusal")
            or (self._refusals and any(map(text[:_BEGINNING].casefold().count, self._refusals)))
        ):
            faults.append(REFUSING)
        return faults
