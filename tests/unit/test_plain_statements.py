"""Forms of a statement that does two things: no line is saved by packing two into it.

``ruff`` has no rule for them. test_layers.py looks for them in the package, which it parses once.
"""

import ast

import pytest

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def inside(node, kinds):
    return [one for one in ast.walk(node) if one is not node and isinstance(one, kinds)]


def nested_conditional(node):
    return inside(node, ast.IfExp)


def nested_comprehension(node):
    """A comprehension within another, and one of them has a condition."""
    within = inside(node, COMPREHENSIONS)
    return within and any(isinstance(one, ast.comprehension) and one.ifs for one in ast.walk(node))


def tuple_assignment(node):
    """Several values that are assigned in one statement.

    A swap is none: one of its values is a target, too.
    """
    if not isinstance(node.value, ast.Tuple):
        return False
    if not any(isinstance(target, ast.Tuple) for target in node.targets):
        return False
    targets = {
        ast.unparse(one)
        for target in node.targets
        for one in ast.walk(target)
        if hasattr(one, "ctx")
    }
    values = {
        ast.unparse(one)
        for one in ast.walk(node.value)
        if isinstance(one, ast.Name | ast.Attribute)
    }
    return not inside(node.value, ast.Starred) and targets.isdisjoint(values)


def product_with_a_condition(node):
    """``", ..." * (count > 3)``: an ``if`` in disguise."""
    if not isinstance(node.op, ast.Mult):
        return False
    for side in (node.left, node.right):
        if isinstance(side, ast.Compare) or (
            isinstance(side, ast.UnaryOp) and isinstance(side.op, ast.Not)
        ):
            return True
        if isinstance(side, ast.Call) and ast.unparse(side.func) == "bool":
            return True
    return False


FORMS = {
    ast.IfExp: nested_conditional,
    **dict.fromkeys(COMPREHENSIONS, nested_comprehension),
    ast.Assign: tuple_assignment,
    ast.BinOp: product_with_a_condition,
}


def packed(nodes):
    forms = [(node, FORMS[type(node)]) for node in nodes if type(node) in FORMS]
    return [f"{node.lineno}: {form.__name__}" for node, form in forms if form(node)]


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
