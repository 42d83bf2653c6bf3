"""The ready-made rollouts against a real vLLM: it takes each field, and its answers have the form
that was asked for.

    pytest tests/real/test_vllm_rollouts.py -s

No test checks words: the model has 135M parameters. See environment.py for the set-up.
"""

import json
import re

import pytest
from datatrove.data import Document

from datatrove_ckpt import InferenceConfig
from datatrove_ckpt.rollouts import ChunkedRollout, CompletionRollout, PromptRollout
from tests.jobs import rows, runner
from tests.real import environment
from tests.real.vllm_servers import vllm_server

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("real_ready_window"),
]

DOCUMENTS = 6
SCHEMA = {
    "type": "object",
    "properties": {
        "why": {"type": "string", "maxLength": 30},
        "answer": {"type": "integer", "minimum": 0, "maximum": 5},
    },
    "required": ["why", "answer"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    # Without the flag, so small a model fills its answer with line breaks, which JSON allows.
    flags = (
        "--structured-outputs-config",
        '{"backend": "xgrammar", "disable_any_whitespace": true}',
    )
    with vllm_server(tmp_path_factory.mktemp("server"), *flags) as url:
        yield url


def results(folder, url, rollout, text="It rained in Paris in 1999.", **changes):
    """The result of each document."""
    settings = {
        "endpoint_url": url,
        "model_max_context": 1024,
        "server_patience_seconds": 600.0,
        "server_ready_max_attempts": 120,
        "default_generation_params": {"max_tokens": 100, "temperature": 0.9},
        **changes,
    }
    config = InferenceConfig("endpoint", environment.model(), **settings)
    step = runner(folder, config, rollout, records_per_chunk=DOCUMENTS)
    step.run(Document(text=text, id=str(number)) for number in range(DOCUMENTS))
    found = [row["metadata"]["rollout_results"][0] for row in rows(folder)]
    assert len(found) == DOCUMENTS
    return found


@pytest.mark.parametrize("engine", ["vllm", "openai"])
def test_answers_follow_a_schema_in_its_order(tmp_path, url, engine):
    rollout = PromptRollout(
        "Rate this text: {text}", json_schema=SCHEMA, engine=engine, answer_attempts=1
    )
    for result in results(tmp_path, url, rollout):
        assert list(json.loads(result["text"])) == ["why", "answer"]


@pytest.mark.parametrize("use_chat", [True, False])
def test_answers_match_a_regex_or_are_one_of_several(tmp_path, url, use_chat):
    kind = PromptRollout if use_chat else CompletionRollout
    asks = {"prompt": "When? {text}", "engine": "vllm", "answer_attempts": 1}
    years = results(
        tmp_path / "regex", url, kind(**asks, regex="year [12][0-9]{3}"), use_chat=use_chat
    )
    assert all(re.fullmatch("year [12][0-9]{3}", one["text"]) for one in years)
    kinds = results(
        tmp_path / "choice", url, kind(**asks, choice=["news", "a story"]), use_chat=use_chat
    )
    assert {one["text"] for one in kinds} <= {"news", "a story"}


def test_the_models_own_tokenizer_counts_what_the_server_counts(tmp_path, url):
    """A text of 20 times the context is cut so that the server takes it, and hardly more than it
    must.
    """
    pytest.importorskip("tokenizers")
    lines = "\n".join(
        f"Line {number}: it rained, and the café was full of wet dogs 🐕." for number in range(1500)
    )
    rollout = PromptRollout("Summarise: {text}", "Be brief.", max_prompt_tokens="auto")
    params = {"max_tokens": 100, "temperature": 0}
    for result in results(tmp_path, url, rollout, lines, default_generation_params=params):
        used = result["usage"]["prompt_tokens"]
        assert 1024 - 100 - 64 - 40 < used <= 1024 - 100


def test_an_answer_is_continued_and_a_conversation_carried(tmp_path, url):
    text = "\n\n".join(f"Paragraph {number} tells how the bridge was built." for number in range(3))
    settings = {"max_chars_per_part": 60, "generation_params": {"max_tokens": 12}}
    for carry in ("continue", "conversation"):
        rollout = ChunkedRollout("Rewrite: {text}", carry=carry, **settings)
        for result in results(tmp_path / carry, url, rollout, text):
            assert result["text"].strip()
            assert 3 <= result["usage"]["completion_tokens"] <= 36
