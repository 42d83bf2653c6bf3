"""What ``show`` prints of a result."""

import pytest

from datatrove_ckpt.maintenance.documents import _text

_USUAL = {
    "finish_reason": "stop",
    "usage": {"prompt_tokens": 1},
    "reasoning": None,
    "logprobs": {"content": [1]},
}


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({"text": "", "tool_calls": [{"id": "1"}]}, '{"tool_calls":[{"id":"1"}]}'),
        (
            {
                "text": "a",
                "choices": [{"text": "a", **_USUAL}, {"text": "b", **_USUAL}],
                "score": 1,
            },
            'a\n\nb\n{"score":1}',
        ),
        (
            {
                "text": "a",
                "tool_calls": [7],
                "choices": [{"text": "a", "tool_calls": [7]}, {"text": "b"}],
            },
            'a\n{"tool_calls":[7]}\n\nb',
        ),
        ({"text": "", "choices": [{"text": "", **_USUAL, "refusal": "no"}]}, '{"refusal":"no"}'),
        ({"text": "a", "score": 0.0, "judgement": "bad"}, 'a\n{"score":0.0,"judgement":"bad"}'),
    ],
)
def test_a_result_is_shown_with_what_it_has_beside_its_text(result, said):
    assert _text({**result, **_USUAL}) == said
