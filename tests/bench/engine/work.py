"""What every row of the table does: the same prompts, the same engine settings, the same number of
tokens.

The engine settings are one list of arguments, that of the server. The offline tool parses it with
the engine's own parser, so that no setting can differ. What an engine sets by itself, and
differently for its offline tool and its server (vLLM: requests and tokens in one batch), is set
here.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, field
from typing import Any

from datatrove_ckpt import InferenceConfig
from datatrove_ckpt.common.redaction import Secret
from datatrove_ckpt.config.inference_config import API_KEY_VARIABLE

INSTRUCTION = (
    "You are an editor of an encyclopedia for children between ten and fourteen years. You read the notes of a "
    "researcher and write one paragraph of it. Keep every fact that can be checked. Leave out opinions, guesses and "
    "repetitions. Explain each difficult word when it comes up for the first time, in half a sentence and without "
    "brackets. Write short sentences in the present tense, and begin with what the paragraph is about. Give numbers in "
    "figures, with their units, and round them if the notes are more exact than a child needs. Name people with their "
    "first and last names, places with their countries, and animals and plants with their common names. If two notes "
    "contradict each other, say so, and do not choose between them. If the notes are in no order, bring them into the "
    "order of time, and if there is none, from the general to the special. Do not invent anything that the notes do "
    "not say, do not address the reader, do not praise the subject, and do not end with a summary. Write nothing but "
    "the paragraph: no title, no list, and no remark about these instructions.\n\nNotes: "
)
"""Begins every prompt, so that there is a prefix to share."""

_WORDS = (
    "river stone market winter engine letter garden copper island window captain harvest signal mountain paper bridge "
    "planet doctor silver forest machine water teacher village mirror number shadow kitchen train summer valley street "
    "morning animal harbour library season weather history country science music"
)


@dataclass(frozen=True)
class Work:
    """One benchmark.

    Attributes:
        engine: vllm, sglang or llamacpp.
        python: the interpreter of the engine's environment. None: this one.
        kwargs: ``model_kwargs``, further flags of the engine.
        environment: additions to the environment of every row.
        documents: number of prompts.
        words: length of a prompt, without the instruction.
        tokens: length of each answer.
        batch: requests that the engine works on at once.
        in_flight: requests that a client keeps at the server: more than ``batch``, so that the
            engine never waits for the next one.
    """

    engine: str
    model: str
    python: str | None = None
    context: int = 2048
    tp: int = 1
    kwargs: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    documents: int = 100
    words: int = 100
    tokens: int = 64
    batch: int = 32
    in_flight: int = 64

    def config(self, **more):
        """The settings of our runner, and of every other row's server."""
        return InferenceConfig(
            self.engine,  # type: ignore[arg-type]
            self.model,
            model_max_context=self.context,
            tp=self.tp,
            server_python=self.python,
            model_kwargs=self._flags(),
            use_chat=False,
            max_concurrent_generations=self.in_flight,
            default_generation_params=self.parameters(),
            **more,
        )

    def parameters(self):
        """Of every request. The end of a text is ignored, so that all answers are equally long."""
        return {"max_tokens": self.tokens, "temperature": 0, "ignore_eos": True}

    def _flags(self):
        flags = {
            # vLLM's and SGLang's usage has the tokens from the prefix cache only if it is asked
            # for.
            "vllm": {
                "max-num-seqs": self.batch,
                "max-num-batched-tokens": max(8192 if self.batch > 128 else 2048, self.context),
                "enable-prompt-tokens-details": True,
            },
            "sglang": {"max-running-requests": self.batch, "enable-cache-report": True},
            "llamacpp": {"parallel": self.batch},
        }
        return flags[self.engine] | {
            name.replace("_", "-"): value for name, value in self.kwargs.items()
        }

    def command(self, port):
        """The server as our runner starts it, but without a key: its arguments, and additions to
        the environment.
        """
        config = self.config()
        command = config.engine.launch(config, 0, Secret("unused"))
        argv = list(command.argv)
        argv[argv.index("--port") + 1] = str(port)
        secret = ("VLLM_API_KEY", API_KEY_VARIABLE)
        return argv, {name: value for name, value in command.env.items() if name not in secret}

    def engine_arguments(self):
        """The server's arguments after its program and the word "serve"."""
        argv, _ = self.command(0)
        if self.engine == "llamacpp":
            return argv[3:]
        if self.engine == "sglang":
            return argv[2:]
        place = argv.index(self.model)
        return ["--model", *argv[place:]]

    def save(self, path):
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path):
        return cls(**json.loads(path.read_text()))


def make_prompts(work, folder):
    """A JSONL file of documents, alone in a folder.

    The same for the same sizes, on every machine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "prompts.jsonl"
    chance, stock = random.Random(0), _WORDS.split()
    with path.open("w") as file:
        for number in range(work.documents):
            words = " ".join(chance.choices(stock, k=work.words))
            row = {
                "id": f"document-{number}",
                "text": f"{INSTRUCTION}{number}. {words}.\n\nParagraph:",
            }
            file.write(json.dumps(row) + "\n")
    return path
