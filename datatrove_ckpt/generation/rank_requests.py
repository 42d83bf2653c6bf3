"""Holds the state that all requests of a rank share: models, checkpoint, counters and end."""

import asyncio
from dataclasses import dataclass

from datatrove_ckpt.checkpoint.open_checkpoint import OpenCheckpoint
from datatrove_ckpt.config import InferenceConfig
from datatrove_ckpt.generation.embedding_batches import EmbeddingBatches
from datatrove_ckpt.generation.limit_watch import LimitWatch
from datatrove_ckpt.generation.once import OnceCalls
from datatrove_ckpt.generation.progress import RankReporter
from datatrove_ckpt.generation.quality import AnswerQuality
from datatrove_ckpt.inference.client.client import CompletionClient, default_api
from datatrove_ckpt.process.shutdown import Shutdown


class RankModel:
    """One of the rank's models.

    Attributes:
        client: future of the client, which is done once the servers are ready.
        usual: API of a payload without a path.
        batches: shared embedding requests; None: texts share no requests.
        policies: policies for bad answers, by their settings; most models have none.
        sizes: length of the first vector for each set of params.
        is_dead: whether a drain ignores its requests in flight.
    """

    batches: EmbeddingBatches | None = None
    is_dead = False

    def __init__(self, config: InferenceConfig) -> None:
        self.config = config
        self.client: asyncio.Future[CompletionClient] = asyncio.get_running_loop().create_future()
        self.usual = default_api(config)
        self.policies = config.answer_policies
        self.sizes: dict[bytes, int] = {}
        if config.texts_per_request > 1:
            self.batches = EmbeddingBatches(config.texts_per_request)


@dataclass(eq=False)
class RankContext:
    """The state that the requests of a rank share.

    Must be created on the rank's event loop.

    Attributes:
        configs: configs of the models, by their names.
        quality: finds faults of answers.
        code: hash of the user's code.
        waiting: number of documents that wait for an answer.
        documents: tasks of the documents in work, by ordinal. They handle their own errors.
    """

    configs: dict[str, InferenceConfig]
    checkpoint: OpenCheckpoint
    observer: RankReporter
    shutdown: Shutdown
    quality: AnswerQuality
    limits: LimitWatch
    code: str

    def __post_init__(self) -> None:
        self.models = {name: RankModel(config) for name, config in self.configs.items()}
        self.model = next(iter(self.models.values()))
        self.calls = OnceCalls(self.observer.own, self.shutdown)
        self.waiting = 0
        self.documents: dict[int, asyncio.Task[None]] = {}
        self.all_started = False
        self.has_ended = False
        self.is_ending = False
        self.storage_free = asyncio.Event()

    async def wait_for_storage(self) -> None:
        # Polls at short intervals would wake thousands of waiting requests each time.
        while self.checkpoint.congested:
            self.storage_free.clear()
            await self.storage_free.wait()
