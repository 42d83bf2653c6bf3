"""A step whose code travels: what a pickle and a copy of an ``InferenceRunner`` hold besides its settings."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Self

from loguru import logger
from multiprocess.reduction import ForkingPickler

from datatrove_ckpt.errors import ConfigError
from datatrove_ckpt.generation import script_names
from datatrove_ckpt.generation.carried_secrets import secrets_in
from datatrove_ckpt.generation.run_identity import CodeIdentity, code_identity
from datatrove_ckpt.generation.step import Step
from datatrove_ckpt.redaction import Veiled


class CarriesCode(Step):
    """Describes the user's code where the step is made, and takes the description along."""

    _code_when_made = Veiled()  # a CodeIdentity, or the dict of 0.1.0: executor.json does not even show its hashes

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        ForkingPickler.register(cls, _for_process)

    def _note_code(self) -> None:
        self._code_when_made = code_identity(self.rollout_fn, self.shared_context, output_writer=self.output_writer)
        made = self._code_when_made.made
        if made is not None and made.left and self.checkpoints_local_dir is not None:
            logger.warning(
                f"rollout_fn: a resume does not notice when these change: {'; '.join(made.left)}. They differ at each "
                "start or machine, or cannot be known."
            )

    def code(self) -> CodeIdentity:
        """What the code adds to the run's identity: of functions that were pickled by value, as they were then."""
        return code_identity(self.rollout_fn, self.shared_context, self._code_when_made, self.output_writer)

    def __getstate__(self) -> dict[str, Any]:
        """For a pickle: also the code as this process describes it, and the names of the script that it uses.

        Raises:
            ConfigError: a file would hold a secret.
        """
        state = {**self.__dict__, "_code_when_made": self.code()}
        if not script_names.carries():
            return state
        adapter = getattr(self.output_writer, "adapter", None)
        if (names := script_names.collect(self.rollout_fn, self.shared_context, adapter)) is not None:
            state["_script_names"] = names
        _refuse_secrets(state if names is None else {**state, "_script_names": names.values})
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        names = state.pop("_script_names", None)
        self.__dict__.update(state)
        if names is not None:
            script_names.restore(names)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Without what only a pickle needs: modules among the names of the script cannot be copied."""
        from datatrove.executor import SlurmPipelineExecutor

        if any(isinstance(outer, SlurmPipelineExecutor) for outer in memo.values()):
            self._check_submission()
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied

    def _check_submission(self) -> None:
        """datatrove copies a Slurm executor, and then opens ``executor.pik``: a refusal must come before that."""
        names: script_names.ScriptNames | None = self.__getstate__().get("_script_names")
        if names is not None:
            script_names.say_left(names)
        script_names.say_missing(self.rollout_fn, *(names.values.values() if names is not None else ()))


def _for_process(step: CarriesCode) -> Any:
    """How a step is pickled for a worker process: through a pipe, with nothing that the process has already."""
    with script_names.nothing_carried():
        return step.__reduce_ex__(2)


def _refuse_secrets(state: dict[str, Any]) -> None:
    try:
        with script_names.nothing_carried():
            places = secrets_in("the step", state)
    except Exception:  # the pickle itself says why it cannot be made
        return
    if places:
        raise ConfigError(
            f"rollout_fn, shared_context or config: what is pickled with the job holds what looks like a secret: "
            f"{', '.join(places)}. It would be in a file that others may read, so nothing was written. Leave it out, "
            "and let the rollout read it where the task runs, from an environment variable, for example."
        )
