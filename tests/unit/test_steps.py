"""What a finished rank keeps of the steps before its runner, and how that is compared."""

import functools
import sys
import types

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.readers.shard_record import (
    StepRecord,
    describe_pipeline,
    differences,
)
from datatrove_ckpt.user_code.code_identity import code_of


class Filter(PipelineStep):
    name, type = "Filter", "test"

    def __init__(self, least=1, **others):
        super().__init__()
        self.least = least
        self.__dict__.update(others)

    def run(self, data, rank=0, world_size=1):
        yield from data


class StatelessFilter(Filter):
    __module__ = "datatrove.pipeline.filters.length"


def test_settings_are_compared_of_stateless_steps_only():
    assert listed([Filter(2)])[0].settings.keys() == listed([Filter])[0].settings.keys()
    then, now = listed([StatelessFilter(1, new=1)]), listed([StatelessFilter(2, old=1)])
    assert differences(then, now) == ["datatrove.StatelessFilter, least: 1 -> 2"]
    assert differences(then, [StepRecord(then[0].name)]) == []


def test_the_list_of_an_executor_names_every_step():
    class Called:
        def __call__(self, data, rank, world_size):
            return data

    def inner(data, rank, world_size):
        return data

    partial = functools.partial(inner, rank=1)
    steps = [[Document("a", "a")], JsonlReader("."), StatelessFilter(2), inner, partial, Called()]
    found = listed(steps)
    names = "documents reader datatrove.StatelessFilter inner inner Called"
    assert [step.name for step in found] == names.split()
    assert differences(found, listed(steps)) == []
    assert differences(found, found[1:]) != [] != differences(found[1:], found)


def listed(steps):
    return describe_pipeline(steps, code_of)


SOURCE = "lambda data, rank, world_size: (one for one in data if one.id in {names} and (lambda: {number})())"


def lambda_of(number=1, names="{'a', 'b', 'c', 'd'}", before=""):
    return eval(before + SOURCE.format(number=number, names=names))


def test_a_lambda_is_compared_by_its_code():
    then = listed([lambda_of()])
    assert differences(then, listed([lambda_of(before="\\\n\\\n")])) == []
    (line,) = differences(then, listed([lambda_of(2)]))
    assert line.startswith(f"<lambda>, code in {sys.implementation.cache_tag}: ")
    assert differences(then, listed([lambda_of(names="{'a', 'b', 'c', 'e'}")])) != []
    of_another_python = [StepRecord("<lambda>", {"code in Python 2.7": "0"})]
    assert differences(of_another_python, then) == []


def test_a_set_in_the_code_of_a_lambda_has_no_order():
    one, two = frozenset((0, 8)), frozenset((8, 0))
    assert list(one) != list(two), "as in another process"
    code = lambda_of().__code__
    same = [types.FunctionType(code.replace(co_consts=(number,)), {}) for number in (one, two)]
    assert differences(listed(same[:1]), listed(same[1:])) == []
