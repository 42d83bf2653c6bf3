"""Forms of statements that pack several into one, and the rooms of the package."""

import ast

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


# Lowest first: a room may import what stands above it, and of that only what its row names.
ROOMS = {
    "errors": "",
    "common": "errors",
    "config": "errors common",
    "process": "errors common",
    "rollouts": "errors common config",
    "checkpoint": "errors common process",
    "mirror": "errors common process checkpoint",
    "claims": "common checkpoint",
    "inference.client": "errors common config process",
    "inference.servers": "errors common config process inference.client",
    "user_code": "errors common",
    "output": "errors common checkpoint",
    "readers": "errors common checkpoint",
    "torch": "errors common process checkpoint readers",
    "generation": "errors common config rollouts process checkpoint mirror"
    " inference.client inference.servers user_code output readers",
    "runner": "common process generation",
    "run_folder": "errors common config process checkpoint mirror claims inference.servers output readers generation"
    " runner",
    "executors": "errors common process claims inference.servers user_code generation runner run_folder",
    "cli": "errors common config process checkpoint mirror output readers torch run_folder executors",
    "testing": "common",
}
