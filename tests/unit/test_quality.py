"""Bad answers are found, and good ones are not taken for bad."""

import random
import time
import timeit
from functools import partial

import pytest

from datatrove_ckpt.generation.quality import FAULTS, INVALID, AnswerQuality, is_looping
from tests import golden

WORDS = [
    "the",
    "a",
    "of",
    "water",
    "town",
    "river",
    "people",
    "found",
    "small",
    "old",
    "large",
    "moves",
    "under",
    "over",
    "light",
]


def sentence(chance, words=12):
    return " ".join(chance.choices(WORDS, k=words)).capitalize() + "."


def faults(quality, text, prompt=""):
    return quality.faults({"text": text, "finish_reason": "stop"}, text.strip(), prompt)


def good(chance):
    return " ".join(sentence(chance) for _ in range(chance.randint(1, 40)))


LOOPS = {
    "a word": lambda chance: good(chance) + " the" * 90,
    "a sentence": lambda chance: good(chance) + f" {sentence(chance)}" * 6,
    "cut off in a turn": lambda chance: (good(chance) + f" {sentence(chance)}" * 9)[:-17],
    "a paragraph": lambda chance: good(chance) + f"\n\n{sentence(chance, 80)}" * 5,
    "a sign": lambda chance: good(chance) + "!" * 300,
    "no ASCII": lambda chance: good(chance) + "水と町。そして川の人々を見た。" * 20,
}
REFUSALS = [
    "I'm sorry, but I can't assist with that request.",
    "I\u2019m sorry, but I can\u2019t help with that.",
    "I am sorry, I cannot provide this.",
    "Sorry, I can't help with that.",
    "I cannot fulfill this request.",
    "I apologize, but I am unable to assist you.",
    "As an AI language model, I cannot write this text.",
    "Unfortunately, I am not able to help with this.",
    "I won't help with that.",
    "I'm not able to continue this story.",
]
NO_REFUSALS = [
    "I can't believe how well this works.",
    "Sorry to hear that! Here is your summary.",
    "I cannot recommend this book enough.",
    "The author says: I cannot help you.",
    "I will not lie, it rained. We went home.",
    "Unfortunately, the town flooded.",
    "I can help with that: the river moves.",
]
NO_LOOPS = golden.values("no_loops", globals())


@pytest.mark.parametrize("text", NO_LOOPS)
def test_what_is_no_loop(text):
    assert not is_looping(text)


def test_phrases_of_the_user_are_refusals_at_the_beginning():
    quality = AnswerQuality(["Das kann ich NICHT"])
    assert faults(quality, "Leider: das kann ich nicht.") == ["refusing"]
    assert faults(quality, "x " * 100 + "Das kann ich nicht.") == []


@pytest.mark.parametrize("text", NO_REFUSALS)
def test_no_refusals(text):
    assert faults(AnswerQuality(), text) == []


def seconds(text):
    """Of this process, at best of ten times."""
    measure = partial(faults, AnswerQuality(), text)
    return min(timeit.repeat(measure, time.process_time, repeat=10, number=100))


@pytest.mark.parametrize("text", ["as an ai, " * 40, "\n" * 400, "-" * 400 + "x"])
def test_no_text_takes_long(text):
    assert seconds(text) < 60 * seconds(good(random.Random(1))[:400])


def test_what_is_planted_in_ten_thousand_answers_is_found_and_nothing_else():
    chance = random.Random(1)
    quality = AnswerQuality()
    earlier = [good(chance) * 2 for _ in range(50)]
    for text in earlier:
        assert faults(quality, text) == []
    kinds = [kind for kind in FAULTS if kind != INVALID]
    planted = dict.fromkeys(kinds, 0)
    found = dict(planted)
    wrong = 0
    for _ in range(10_000):
        fault = chance.choice([None] * 16 + kinds)
        prompt = f"Rewrite: {good(chance)}"
        text = good(chance)
        if fault == "looping":
            text = chance.choice([*LOOPS.values()])(chance)
        elif fault == "refusing":
            text = chance.choice(REFUSALS)
        elif fault == "copying":
            text = text + sentence(chance) * 2
            prompt = f"Rewrite: {text}\n"
        elif fault == "repeating":
            text = chance.choice(earlier)
        said = {*faults(quality, text, prompt)}
        if fault is not None:
            planted[fault] += 1
            found[fault] += fault in said
        wrong += bool(said - {fault})
    assert found == planted
    assert wrong == 0
