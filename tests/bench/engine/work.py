"""What every row of the table does: the same prompts, the same engine settings, the same number of
tokens.

The engine settings are one list of arguments, that of the server. The offline tool parses it with
the engine's own parser, so that no setting can differ. What an engine sets by itself, and
differently for its offline tool and its server (vLLM: requests and tokens in one batch), is set
here.
"""

import json
import random
from dataclasses import dataclass, field
from typing import Any

from datatrove_ckpt import InferenceConfig
from datatrove_ckpt.common.redaction import Secret

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
        engine: vllm or llamacpp.
        python: the interpreter of the engine's environment. None: this one.
        kwargs: ``model_kwargs``, further flags of the engine.
        environment: additions to the environment of every row.
        documents: number of prompts.
        words: length of a prompt, without the instruction.
        tokens: length of each answer.
        batch: requests that the engine works on at once. A client keeps twice as many at the
            server, so that the engine never waits for the next one.
    """

    engine: str
    model: str
    python: str | None = None
    context: int = 2048
    kwargs: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    documents: int = 100
    words: int = 100
    tokens: int = 64
    batch: int = 32

    def config(self, **more):
        """The settings of our runner, and of every other row's server."""
        if self.engine == "llamacpp":
            flags = {"parallel": self.batch}
        else:
            most = max(8192 if self.batch > 128 else 2048, self.context)
            flags = {"max-num-seqs": self.batch, "max-num-batched-tokens": most}
        return InferenceConfig(
            self.engine,  # type: ignore[arg-type]
            self.model,
            model_max_context=self.context,
            server_python=self.python,
            model_kwargs=flags | self.kwargs,
            use_chat=False,
            max_concurrent_generations=2 * self.batch,
            default_generation_params=self.parameters(),
            **more,
        )

    def parameters(self):
        """Of every request. The end of a text is ignored, so that all answers are equally long."""
        return {"max_tokens": self.tokens, "temperature": 0, "ignore_eos": True}

    def engine_arguments(self):
        """The server's arguments after its program and the word "serve"."""
        config = self.config()
        argv = list(config.engine.launch(config, 0, Secret("unused")).argv)
        if self.engine == "llamacpp":
            return argv[3:]
        return ["--model", *argv[argv.index(self.model) :]]


def make_prompts(work, folder):
    """A JSONL file of documents, alone in a folder.

    The same for the same sizes, on every machine.
    """
    folder.mkdir(parents=True)
    chance, stock = random.Random(0), _WORDS.split()
    with (folder / "prompts.jsonl").open("w") as file:
        for number in range(work.documents):
            words = " ".join(chance.choices(stock, k=work.words))
            text = f"{INSTRUCTION}{number}. {words}.\n\nParagraph:"
            file.write(json.dumps({"id": f"document-{number}", "text": text}) + "\n")
