"""When two settings are the same, and that a run asks."""

import pytest

from datatrove_ckpt.checkpoint.compare import same_value

ONE = {"properties": {"reason": {"type": "string"}, "score": {"type": "integer"}}}
OTHER = {"properties": {"score": {"type": "integer"}, "reason": {"type": "string"}}}


@pytest.mark.parametrize(
    "name, old, new, same",
    [
        ("rollout_fn.generation_params", {"a": 1, "b": [2.5]}, {"b": [2.5], "a": 1.0}, True),
        ("rollout_fn.generation_params", {"ignore_eos": True}, {"ignore_eos": 1}, False),
        ("rollout_fn.generation_params", {"a": None}, {}, False),
        ("rollout_fn.json_schema", ONE, ONE, True),
        ("rollout_fn.json_schema", ONE, OTHER, False),
        (
            "default_generation_params",
            {"x": 1, "structured_outputs": ONE},
            {"structured_outputs": ONE, "x": 1},
            True,
        ),
        ("default_generation_params", {"guided_json": ONE}, {"guided_json": OTHER}, False),
        ("model_kwargs", {"a": ONE}, {"a": OTHER}, True),
        ("output_writer", "jobs.JsonlWriter", "datatrove.JsonlWriter", False),
        ("x", float(2**60), 2**60 + 1, False),
        ("rollout_fn.lowest", "float 0x0.0p+0", 0, True),
        ("rollout_fn.lowest", "float 0x0.0p+0", "float -0x0.0p+0", False),
    ],
)
def test_same(name, old, new, same):
    assert same_value(name, old, new) is same
