"""The types of datatrove's inference, under the import path of its ``types``."""

from datatrove.pipeline.inference.types import InferenceError as InferenceError
from datatrove.pipeline.inference.types import InferenceResult as InferenceResult
from datatrove.pipeline.inference.types import RolloutFunction as RolloutFunction
from datatrove.pipeline.inference.types import ServerError as ServerError
