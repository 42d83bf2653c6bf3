"""Runs the embedded engine as a process (``python -m datatrove_ckpt.inference.servers.llamacpp``).

xllamacpp contains llama.cpp and its OpenAI server; its crash must not end the runner. The API key
comes from DATATROVE_CKPT_API_KEY.

Any further ``--name=value`` sets the plain field of that name in llama.cpp's common_params
(``--n-batch=512``), for ``model_kwargs``. An enum takes the end of a member's name:
``--pooling-type=mean`` for LLAMA_POOLING_TYPE_MEAN.
"""

import argparse
import os
import signal
import sys
from enum import Enum
from typing import Any

from datatrove_ckpt.config.inference_config import API_KEY_VARIABLE, HOST, usable_cores

# xllamacpp.CommonParams, which has no type hints.
CommonParams = Any


def main(arguments: list[str] | None = None) -> int:
    import xllamacpp

    params = flags_set(xllamacpp.CommonParams(), arguments)
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        print(f"llama.cpp could not start with {params.model.path}: {error}", file=sys.stderr)
        return 1
    print(f"listening on {server.listening_address}", flush=True)
    while True:
        signal.pause()


def flags_set(params: CommonParams, arguments: list[str] | None) -> CommonParams:
    """Returns llama.cpp's settings. A wrong argument ends the process with exit code 2."""
    usage = (
        "%(prog)s --model FILE --alias NAME --port PORT [--NAME=VALUE ...], the names of plain "
        "fields of common_params"
    )
    parser = argparse.ArgumentParser(usage=usage, allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--alias", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context", type=int, default=2048)  # tokens of a request
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--threads", type=int, default=usable_cores())
    settings, fields = parser.parse_known_args(arguments)
    params.model.path = settings.model
    params.model_alias = {settings.alias}
    params.hostnames = [HOST]
    params.n_parallel = settings.parallel
    # llama.cpp divides the context among its parallel requests.
    params.n_ctx = settings.context * params.n_parallel
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings.threads
    params.endpoint_metrics = True
    params.ui = False
    params.verbosity = 2  # warnings and errors; 3, the default, logs a page per request
    key = os.environ.pop(API_KEY_VARIABLE, None)
    if key:
        params.api_keys = [key]
    params.port = settings.port
    for field in fields:
        try:
            _set(params, field)
        except (AttributeError, TypeError, ValueError) as error:
            parser.error(f"unrecognized arguments: {field} ({error})")
    return params


def _set(params: CommonParams, field: str) -> None:
    flag, _, text = field.partition("=")
    name = flag.removeprefix("--").replace("-", "_")
    is_negative = name.startswith("no_") and not hasattr(params, name)
    if is_negative:
        name = name.removeprefix("no_")
    value: object = not is_negative
    kind = type(getattr(params, name))
    if issubclass(kind, Enum):
        prefix = f"{kind.__name__.upper()}_"
        values = {
            key.removeprefix(prefix).lower(): member for key, member in kind.__members__.items()
        }
        value = values.get(text.lower())
    elif kind in (int, float, str):
        value = kind(text)
    elif kind is not bool or text:
        raise TypeError("no plain field")
    setattr(params, name, value)


if __name__ == "__main__":
    sys.exit(main())
