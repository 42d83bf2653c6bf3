"""``python -m datatrove_ckpt.inference.servers.llamacpp``: the process of the embedded engine.

xllamacpp is one wheel without dependencies that contains llama.cpp and its OpenAI server. It runs in its own process,
because a crash of native code must not end the runner. The API key comes from DATATROVE_CKPT_API_KEY. SIGTERM ends the
process at once.

Any further ``--name=value`` sets the plain field of that name in llama.cpp's common_params
(``--n-batch=512 --n-gpu-layers=99``). So ``model_kwargs`` reaches all of llama.cpp, and we need no list of its fields.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Any

from datatrove_ckpt.config.inference_config import API_KEY_VARIABLE, HOST, usable_cores
from datatrove_ckpt.errors import ConfigError

# llama.cpp's log levels: 2 is warnings and errors. At its default, 3, the log grows by a page per request.
_WARNINGS = 2

# xllamacpp.CommonParams. ``Any``, because xllamacpp has no type hints.
CommonParams = Any


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal arrives; the exit code."""
    known, rest = _parser().parse_known_args(arguments)
    import xllamacpp

    try:
        params = _params(xllamacpp.CommonParams(), known, rest)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    # Blocks until the model is loaded; /v1/models answers 503 meanwhile.
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        print(f"llama.cpp could not start with {params.model.path}: {error}", file=sys.stderr)
        return 1
    print(f"listening on {server.listening_address}", flush=True)
    while True:
        signal.pause()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="datatrove_ckpt.inference.servers.llamacpp", allow_abbrev=False)
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--alias", required=True, help="the model's name in requests and answers")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context", type=int, default=2048, help="tokens per request")
    parser.add_argument("--parallel", type=int, default=1, help="requests in work at once")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="threads; default: all usable cores")
    return parser


def _params(params: CommonParams, known: argparse.Namespace, rest: list[str]) -> CommonParams:
    params.model.path = known.model
    params.model_alias = {known.alias}
    params.hostnames = [HOST]
    params.port = known.port
    params.n_parallel = known.parallel
    params.n_ctx = known.context * known.parallel  # llama.cpp divides its context among its parallel requests
    params.cpuparams.n_threads = known.threads
    params.cpuparams_batch.n_threads = known.threads
    params.endpoint_metrics = True
    params.ui = False
    params.verbosity = _WARNINGS
    key = os.environ.pop(API_KEY_VARIABLE, None)
    if key:
        params.api_keys = [key]
    for argument in rest:
        _set_field(params, argument)
    return params


def _set_field(params: CommonParams, argument: str) -> None:
    """Set one field from ``--name=value``, ``--name`` or ``--no-name``.

    Raises:
        ConfigError: there is no such field, or the value does not have its type.
    """
    name, has_value, text = argument.removeprefix("--").partition("=")
    field = name.replace("-", "_")
    value: str | bool = text if has_value else True
    if not has_value and field.startswith("no_") and not hasattr(params, field):
        field, value = field.removeprefix("no_"), False
    current = getattr(params, field, None)
    if not argument.startswith("--") or type(current) not in (bool, int, float, str):
        raise ConfigError(f"unrecognized arguments: {argument} (no plain field of llama.cpp's common_params)")
    try:
        setattr(params, field, _converted(value, type(current)))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"unrecognized arguments: {argument} ({error})") from error


def _converted(value: str | bool, kind: type) -> object:
    if kind is bool and isinstance(value, str):
        if value.lower() not in ("true", "false"):
            raise ValueError("needs true or false")
        return value.lower() == "true"
    if isinstance(value, bool) and kind is not bool:
        raise ValueError("needs a value")
    return kind(value)


if __name__ == "__main__":
    sys.exit(main())
