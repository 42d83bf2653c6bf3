"""What all requests of a rank share: its models, its checkpoint, its counters and its end."""

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
        client: ready once its servers are.
        usual: the way of a payload without a path.
        batches: None: texts share no requests.
        policies: for bad answers, by their settings; most models have none.
        sizes: length of the first vector for each set of params.
        is_dead: a drain does not wait for its requests in flight.
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
    """What the requests of a rank share. The ``Scheduler`` says what its documents do.

    Must be made on the event loop that runs it.

    Attributes:
        configs: of the models, by their names.
        quality: finds what is wrong with answers.
        code: hash of the user's code.
        waiting: documents that wait for an answer.
        documents: the documents in work, by ordinal. They handle their errors themselves.
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
        # Looks at short intervals would wake thousands of waiting requests each time.
        while self.checkpoint.congested:
            self.storage_free.clear()
            await self.storage_free.wait()
