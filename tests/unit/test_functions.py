"""What functions of many modules give for a value."""

from importlib import import_module

from tests import golden


@golden.rows("functions")
def test_what_a_function_gives(code):
    module, _, expression = code.partition(": ")
    names = vars(import_module(f"datatrove_ckpt.{module}"))
    golden.hold("functions", code, repr(eval(expression, {**names})))
