"""``python -m datatrove_ckpt.inference.servers.llamacpp``: the process of the embedded engine.

xllamacpp contains llama.cpp and its OpenAI server; its crash must not end the runner. The API key
comes from DATATROVE_CKPT_API_KEY.

Any further ``--name=value`` sets the plain field of that name in llama.cpp's common_params
(``--n-batch=512``), for ``model_kwargs``. An enum takes the end of a member's name:
``--pooling-type=mean`` for LLAMA_POOLING_TYPE_MEAN.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

from datatrove_ckpt.config.inference_config import API_KEY_VARIABLE, HOST, usable_cores

# Warnings and errors; the default, 3, logs a page per request.
_WARNINGS = 2

# Of xllamacpp.CommonParams, which has no type hints.
CommonParams = Any
_PLAIN = (bool, int, float, str)


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
    """llama.cpp's settings. A wrong argument ends the process with exit code 2."""
    usage = (
        "%(prog)s --model FILE --alias NAME --port PORT [--NAME=VALUE ...], the names of plain "
        "fields of common_params"
    )
    # "resolve": our flags may have names of fields, and ``--no-x`` may be a field, too.
    parser = argparse.ArgumentParser(
        usage=usage,
        argument_default=argparse.SUPPRESS,
        conflict_handler="resolve",
        allow_abbrev=False,
    )
    kinds = {name: type(getattr(params, name)) for name in dir(params) if not name.startswith("_")}
    fields = {
        f"{name.replace('_', '-')}": (name, kind)
        for name, kind in kinds.items()
        if kind in _PLAIN or issubclass(kind, Enum)
    }
    for flag, (name, kind) in fields.items():
        if kind is bool:
            parser.add_argument(f"--no-{flag}", dest=name, action="store_false")
    # Last, because a field called no_x is not the opposite of x.
    for flag, (name, kind) in fields.items():
        if kind is bool:
            parser.add_argument(f"--{flag}", dest=name, action="store_true")
        else:
            parser.add_argument(f"--{flag}", dest=name, type=_reader(kind))
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--alias", required=True, help="the model's name in requests and answers")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context", type=int, default=2048, help="tokens per request")
    parser.add_argument("--parallel", type=int, default=1, help="requests in work at once")
    parser.add_argument(
        "--threads", type=int, default=usable_cores(), help="threads; default: all usable cores"
    )
    given = vars(parser.parse_args(arguments))
    params.model.path = given.pop("model")
    params.model_alias = {given.pop("alias")}
    params.hostnames = [HOST]
    params.n_parallel = given.pop("parallel")
    # llama.cpp divides it among its parallel requests.
    params.n_ctx = given.pop("context") * params.n_parallel
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given.pop("threads")
    params.endpoint_metrics = True
    params.ui = False
    params.verbosity = _WARNINGS
    key = os.environ.pop(API_KEY_VARIABLE, None)
    if key:
        params.api_keys = [key]
    for name, value in given.items():
        try:
            setattr(params, name, value)
        except (TypeError, ValueError) as error:
            parser.error(f"unrecognized arguments: --{name}={value} ({error})")
    return params


def _reader(kind: type) -> Callable[[str], object]:
    if not issubclass(kind, Enum):
        return kind
    prefix = f"{kind.__name__.upper()}_"
    members = {
        name.removeprefix(prefix).lower(): member for name, member in kind.__members__.items()
    }

    def read(text: str) -> Enum:
        if text.lower() not in members:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(members)}")
        return members[text.lower()]

    return read


if __name__ == "__main__":
    sys.exit(main())
