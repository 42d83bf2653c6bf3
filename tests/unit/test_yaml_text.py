"""YAML that is written is read as what it was."""

from hypothesis import given, settings

from datatrove_ckpt.cli.yaml_config import dump, read_value
from tests import golden
from tests.unit.tables import plain


@settings(max_examples=40, deadline=None)
@given(plain)
def test_any_value_comes_back(value):
    assert read_value(dump(value)) == value


TEXTS = golden.values("texts_in_yaml", {})


def test_a_text_stays_a_text():
    for value in (*TEXTS, TEXTS, {"a": TEXTS}, dict.fromkeys(TEXTS, "a")):
        assert read_value(dump(value)) == value


def test_a_text_of_several_lines_is_written_as_such():
    assert (
        dump({"prompt": "Rewrite this: é\n\n{text}"})
        == "prompt: |-\n  Rewrite this: é\n\n  {text}\n"
    )
