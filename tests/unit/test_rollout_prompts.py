"""What ready-made rollouts make their prompts from: fields, columns, lists of messages, and how
much of a text.
"""

import copy
import json
import pickle
from contextlib import nullcontext
from pathlib import Path

import pytest
from datatrove.data import Document

from datatrove_ckpt.checkpoint.checksummed_lines import checksummed_json
from datatrove_ckpt.checkpoint.identity import FORMAT
from datatrove_ckpt.errors import ConfigError, ServerRefused
from datatrove_ckpt.rollouts import (
    ChunkedRollout,
    CompletionRollout,
    PromptRollout,
    for_config,
)
from datatrove_ckpt.rollouts.token_counter import load_counter
from datatrove_ckpt.user_code.code_identity import code_identity
from tests import golden
from tests.clients import config
from tests.jobs import rejects, rows, runner
from tests.rollouts import asked, document
from tests.words import write_tokenizer


def content(rollout, given):
    """The user message."""
    return str(asked(rollout, given)["messages"][-1]["content"])


# fields and columns ------------------------------------------------------------------------------

EARLIER = {"summary": {"moods": ["good", "bad"]}, "rollout_results": [{"text": "é"}]}


@golden.rows("prompts")
def test_keys_of_the_metadata_and_parts_of_their_values_are_filled_in(code, words):
    given = document(title="Rain", year=1854, **EARLIER)
    given.metadata |= {"a.b": "dot", "a-b c": "hyphen", "of-all": {"x y": "of all"}, "null": None}
    given.metadata["text"] = "not this one"
    golden.show(
        "prompts",
        code,
        {**globals(), "words": words, "sent": lambda rollout: asked(rollout, given)},
    )


# lists of messages -------------------------------------------------------------------------------

USER = {"role": "user", "content": "Why?"}
SYSTEM = {"role": "system", "content": "Be kind."}


def test_a_list_in_the_text_is_written_as_json_and_each_rollout_finds_it(tmp_path, server):
    """Such documents come from readers with ``text_key: messages``; the output's text must be a
    text.
    """
    step = runner(tmp_path, server, PromptRollout(), config={"rollouts_per_document": 2})
    step.run(Document(text=[{"role": "user", "content": f"Why {n}?"}], id=str(n)) for n in range(2))
    assert sorted(server.asked.elements()) == ["Why 0?", "Why 0?", "Why 1?", "Why 1?"]
    assert [json.loads(row["text"]) for row in rows(tmp_path)] == [
        [{"role": "user", "content": f"Why {n}?"}] for n in range(2)
    ]


def of_chat(rollout, chat):
    """What is sent for JSON in a column."""
    return asked(for_config(rollout, config()), document(chat=chat))["messages"]


CHAT = json.dumps([SYSTEM, USER])
NO_CHATS = ["[1] Why?", "[]", "[", '["Why?"]', '[{"content": "Why?"}]', json.dumps(USER)]


@pytest.mark.parametrize("version", [None, "1"])
def test_a_run_that_sent_json_of_chats_as_one_message_goes_on_so(tmp_path, server, version):
    def run(stops=False):
        asked_before = len(server.payloads)
        fails[:] = [texts[2], chats[2]] * stops
        step = runner(
            tmp_path,
            server,
            PromptRollout(prompt_column="chat"),
            rollout_version=version,
            records_per_chunk=1,
            config={"max_concurrent_documents": 1},
        )
        with pytest.raises(ServerRefused) if stops else nullcontext():
            step.run(Document(text="", id=str(n), metadata={"chat": chats[n]}) for n in range(4))
        return step, [one["messages"][0]["content"] for one in server.payloads[asked_before:]]

    fails = []
    server._status = rejects(fails, 401)
    texts = [f"Why {n}?" for n in range(4)]
    chats = [json.dumps([{**USER, "content": text}]) for text in texts]
    step, sent = run(stops=True)
    assert sent == texts[:3]
    old = {**step.identity(1).fields}
    assert old.pop("rollout_fn.chat_texts")
    for path in (tmp_path / "checkpoints").rglob("*.json"):
        if path.name in ("run.json", "job.json"):
            path.write_bytes(checksummed_json({"format": FORMAT, **old}))
    assert run(stops=True)[1] == [chats[2]]
    assert run()[1] == chats[2:]


# limits in tokens --------------------------------------------------------------------------------


@pytest.fixture
def words(tmp_path):
    """The folder of a tokenizer whose tokens are words."""
    return write_tokenizer(tmp_path / "words")


LINES = "one two three\nfour five six\nseven eight nine"


def test_the_models_own_tokenizer_is_the_default_and_part_of_the_identity(words):
    rollout = PromptRollout(max_prompt_tokens=5)
    fitted = for_config(rollout, config(model_name_or_path=words))
    assert "tokenizer_hash" not in vars(rollout), "the user's object stays as it is"
    fields = code_identity(fitted, None).fields
    assert fields["rollout_fn.tokenizer_hash"] == load_counter(words, None).digest
    assert fields["rollout_fn.max_prompt_tokens"] == 5
    flags = {"tokenizer": words, "revision": "of-the-model"}
    assert for_config(rollout, config(model_kwargs=flags)).counted_by == [words, None]
    for same in (copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted))):
        assert same == fitted
        assert content(same, document(LINES)) == "one two three"


def test_a_node_with_another_tokenizer_stops_and_blames_no_document(words, server, tmp_path):
    rollout = PromptRollout(max_prompt_tokens=5, tokenizer=words)
    step = runner(tmp_path, server, rollout, on_document_error="dead_letter")
    write_tokenizer(Path(words), more=["extra"])
    load_counter.__globals__["_load"].cache_clear()
    with pytest.raises(ConfigError, match=r"^tokenizer: tokenizer\.json of '.*' differs here"):
        pickle.loads(pickle.dumps(step)).run([document(LINES)])
    assert not list(tmp_path.rglob("dead_letters.jsonl"))


def test_a_tokenizer_that_is_not_there_says_what_to_do(tmp_path):
    rollout = PromptRollout(max_prompt_tokens=9, tokenizer=str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        for_config(rollout, config())
    assert str(refused.value) == (
        f"tokenizer: {tmp_path}/tokenizer.json is no file on this machine. Correct the path. Or set chars_per_token, "
        "and no tokenizer is needed."
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"^tokenizer: tokenizer\.json of .* is broken: "):
        for_config(rollout, config())


def test_settings_that_are_not_used_are_not_part_of_the_identity():
    for rollout in (PromptRollout(), CompletionRollout(), ChunkedRollout()):
        fitted = for_config(rollout, config(use_chat=not isinstance(rollout, CompletionRollout)))
        assert vars(fitted) == vars(rollout)
        assert not vars(fitted).keys() - {
            "prompt", "system_prompt", "generation_params", "max_chars_per_part", "separator", "parallel"
        }  # fmt: skip
