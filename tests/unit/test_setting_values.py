"""When two settings are the same, and that a run asks."""

import pytest

from datatrove_ckpt.checkpoint.compare import same_value
from tests import golden

ONE = {"properties": {"reason": {"type": "string"}, "score": {"type": "integer"}}}
OTHER = {"properties": {"score": {"type": "integer"}, "reason": {"type": "string"}}}


@pytest.mark.parametrize("code", golden.sections("same_values"))
def test_same(code):
    golden.show("same_values", code, {"same_value": same_value, "ONE": ONE, "OTHER": OTHER})
