"""When two settings are the same, and that a run asks."""

from datatrove_ckpt.checkpoint.compare import same_value
from tests import golden

ONE = {"properties": {"reason": {"type": "string"}, "score": {"type": "integer"}}}
OTHER = {"properties": {"score": {"type": "integer"}, "reason": {"type": "string"}}}


test_same = golden.shows("same_values", {"same_value": same_value, "ONE": ONE, "OTHER": OTHER})
