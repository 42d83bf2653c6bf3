"""Reads the log of a server: finds its last line, and the cause of a failed start.

Engines bury the cause in tracebacks, and each wrong guess costs a start-up on a GPU node.
"""

import re
from pathlib import Path

from datatrove_ckpt.common.formatting import as_line, cut
from datatrove_ckpt.config.inference_config import ENGINES, Engine, KnownFailure

# Bytes at the end of the log: vLLM prints the cause well before its last traceback.
_SEARCHED_BYTES = 256 * 1024
_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_EXTRAS = {engine.package: engine.name for engine in ENGINES.values()}
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


_COMMON = (
    (
        KnownFailure(
            "The server does not know a flag or its value. Check model_kwargs against its "
            "--help. To leave out a flag of ours that an old version lacks, set model_kwargs "
            "{flag: null}.",
            True,
        ),
        r"unrecognized arguments|invalid choice:|ambiguous option|expected (?:one|at least one) "
        r"argument"
        r"|arguments are required|ignored explicit argument|invalid \w+ value:",
    ),
    (Engine.PORT_TAKEN, r"address already in use|errno 98\b"),
    (
        KnownFailure(
            "The model hub refuses access. Accept the model's licence and export HF_TOKEN.", True
        ),
        r"gated ?repo|access to model .* is restricted|401 client error",
    ),
    (
        KnownFailure(
            "There is no such model. Check its name: a name on the hub, or a folder on this node.",
            True,
        ),
        r"repository ?not ?found|not a valid model identifier|incorrect "
        r"path_or_model_id|hfvalidationerror",
    ),
    (
        KnownFailure(
            "The model brings its own code. If you trust it, set trust_remote_code: true.", True
        ),
        r"contains custom code which must be executed|(?:pass the argument|set the option) "
        r".?trust_remote_code",
    ),
    (Engine.TOO_FEW_GPUS, r"invalid device ordinal|no cuda gpus are available"),
    (Engine.GPU_FULL, r"cuda out of memory|outofmemoryerror"),
)
# Causes of all engines: a user's script may start any engine.
_CAUSES = (*(cause for engine in ENGINES.values() for cause in engine.causes), *_COMMON)


def find_cause(exit_code: int | None, log: str) -> KnownFailure | None:
    if exit_code == 127:
        return KnownFailure("The command was not found, or is not executable.", permanent=True)
    if missing := _MODULE.search(log):
        name = missing[1]
        if name in _EXTRAS:
            package = f"'datatrove-ckpt[{_EXTRAS[name]}]'"
        else:
            package = name.partition(".")[0]
        return KnownFailure(
            f"The Python package {name!r} is missing. Run: pip install {package}", permanent=True
        )
    for cause, pattern in _CAUSES:
        if exit_code is not None and re.search(pattern, log, re.IGNORECASE):
            return cause
    if exit_code == 137:
        return KnownFailure(
            "It was killed (SIGKILL), perhaps out of main memory. See dmesg, or ask Slurm for more "
            "--mem."
        )
    return None


def read_log(path: Path, start: int) -> str:
    """Returns the log from byte ``start``, at most its end; empty if there is no log."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(start, size - _SEARCHED_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def last_line(log: str) -> str:
    """Returns the last line with text, fit for a terminal; for a progress bar its last state."""
    for line in reversed(log.replace("\r", "\n").split("\n")):
        text = as_line(_ESCAPE.sub("", line)).strip()
        if text:
            return cut(text, 200)
    return ""
