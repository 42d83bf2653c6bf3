"""The finish_reasons of servers that need no attention, in lower case."""

ENDINGS = frozenset(
    """
    complete completed end_turn eos eos_token function_call stop stop_sequence tool_call tool_calls
    tool_use
    """.split()  # noqa: SIM905
)
"""Reasons of whole answers."""
CUT_OFF = frozenset({"length", "max_tokens", "model_length", "model_context_window_exceeded"})
"""The answer reached max_tokens, or the end of the model's context."""
USUAL = ENDINGS | CUT_OFF
