"""Forms of a statement that does two things: no line is saved by packing two into it.

``ruff`` has no rule for them. test_layers.py looks for them in the package, which it parses once.
"""

import ast

import pytest

from tests.syntax import (
    nested_comprehension,
    nested_conditional,
    packed,
    product_with_a_condition,
    tuple_assignment,
)


@pytest.mark.parametrize(
    "is_packed, code, plain",
    [
        (nested_conditional, "a if b else c if d else e", "a if b else c"),
        (nested_comprehension, "[[x for x in y if x] for y in z]", "[[x for x in y] for y in z]"),
        (tuple_assignment, "a, b = 1, c", "a, b = b, a"),
        (product_with_a_condition, "'s' * (count != 1)", "size * count"),
    ],
)
def test_each_form_is_found(is_packed, code, plain):
    assert packed(ast.walk(ast.parse(code))) == [f"1: {is_packed.__name__}"]
    assert packed(ast.walk(ast.parse(plain))) == []
