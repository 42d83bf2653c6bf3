"""Finds out why a server did not start, from its exit code and the end of its log.

Engines bury the cause under pages of traceback, and each wrong guess costs another start-up on a GPU node. Each known
cause has an explanation, what to do, and whether another attempt can succeed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from datatrove_ckpt.redaction import HIDDEN, may_name_secret

LOG_TAIL_LINES = 20
# Bytes at the end of the log that are searched for a cause. vLLM prints it well before its last traceback.
_SEARCHED_BYTES = 256 * 1024
_FLAG = re.compile(r"--([\w-]+)(=|$)")
_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_EXTRAS = {"xllamacpp": "llamacpp", "vllm": "vllm", "sglang": "sglang"}
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SHOWN_LINE = 200  # characters
_EXIT_NOT_FOUND = 127
_EXIT_KILLED = 137


@dataclass(frozen=True)
class Cause:
    """A known reason for a failed start.

    Attributes:
        text: what happened and what to do.
        permanent: another attempt with the same command cannot succeed.
        port_taken: another process took the port between our choice and the server's bind.
    """

    text: str
    permanent: bool = False
    port_taken: bool = False


_KNOWN: tuple[tuple[re.Pattern[str], Cause], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE), cause)
    for pattern, cause in (
        (
            r"unrecognized arguments|invalid choice:|ambiguous option|expected (?:one|at least one) argument"
            r"|arguments are required|ignored explicit argument|invalid \w+ value:",
            Cause(
                "The server does not know a flag or its value. Check model_kwargs against its --help. To leave out a "
                "flag of ours that an old version lacks, set model_kwargs {flag: null}.",
                True,
            ),
        ),
        (
            r"address already in use|errno 98\b|couldn't bind|could not bind|failed to bind",
            Cause("The port was taken by another process. A new start takes another port.", port_taken=True),
        ),
        (
            r"gated ?repo|access to model .* is restricted|401 client error",
            Cause("The model hub refuses access. Accept the model's licence and export HF_TOKEN.", True),
        ),
        (
            r"repository ?not ?found|not a valid model identifier|incorrect path_or_model_id|hfvalidationerror",
            Cause("There is no such model. Check model_name_or_path: a hub name, or a folder on this node.", True),
        ),
        (
            r"contains custom code which must be executed|(?:pass the argument|set the option) .?trust_remote_code",
            Cause("The model brings its own code. If you trust it, set trust_remote_code: true.", True),
        ),
        (
            r"is greater than the derived max_model_len|larger than the maximum number of tokens that can be stored"
            r"|longer than the model's context length|KV cache is needed, which is larger than",
            Cause("model_max_context is more than the model or the GPU's memory allows. Lower it.", True),
        ),
        (
            r"number of required gpus exceeds|world size \(?\d+\)? is larger than the number of available gpus"
            r"|invalid device ordinal|no cuda gpus are available|failed to infer device type"
            r"|exceeds the (?:total )?number of available gpus",
            Cause("There are too few GPUs. tp * dp * pp must not exceed the GPUs of this task (nvidia-smi).", True),
        ),
        (
            r"cuda out of memory|outofmemoryerror|no available memory for the cache blocks"
            r"|free memory on device .* is less than desired|not enough memory\. please try to increase --mem-fraction",
            Cause(
                "The GPU's memory is full. Lower model_max_context or gpu-memory-utilization (model_kwargs), raise "
                "tp, or stop other programs on the GPU (nvidia-smi)."
            ),
        ),
    )
)


def find_cause(exit_code: int | None, log: str) -> Cause | None:
    """The cause, if the log or the exit code shows a known one."""
    if exit_code == _EXIT_NOT_FOUND:
        return Cause("The command was not found, or is not executable.", permanent=True)
    if missing := _MODULE.search(log):
        name = missing[1]
        package = f"'datatrove-ckpt[{_EXTRAS[name]}]'" if name in _EXTRAS else name.partition(".")[0]
        return Cause(f"The Python package {name!r} is missing. Run: pip install {package}", permanent=True)
    for pattern, cause in _KNOWN:
        if exit_code is not None and pattern.search(log):
            return cause
    if exit_code == _EXIT_KILLED:
        return Cause("It was killed (SIGKILL), perhaps out of main memory. See dmesg, or ask Slurm for more --mem.")
    return None


def read_log(path: Path, start: int) -> str:
    """The end of what was written to the log since byte ``start``; empty if there is no log."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(start, size - _SEARCHED_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


def last_line(log: str) -> str:
    """The last line that says something, made fit for a terminal; of a progress bar its last state. "" if none does."""
    for line in reversed(log.replace("\r", "\n").split("\n")):
        shown = "".join(part if part.isprintable() else " " for part in _ESCAPE.sub("", line)).strip()
        if shown:
            return shown if len(shown) <= _SHOWN_LINE else f"{shown[:_SHOWN_LINE]}..."
    return ""


def report(what: str, argv: tuple[str, ...], log_path: Path, log: str, cause: Cause | None = None) -> str:
    """An error message: what happened, why, which command, and the last lines of its log."""
    lines = [what]
    if cause is not None:
        lines.append(f"Cause: {cause.text}")
    lines.append(f"Command: {redacted_command(argv)}")
    tail = log.rstrip().splitlines()[-LOG_TAIL_LINES:]
    lines.append(f"End of its log ({log_path}):" if tail else f"Its log is empty ({log_path}).")
    lines += [f"  {line}" for line in tail]
    return "\n".join(lines)


def redacted_command(argv: tuple[str, ...]) -> str:
    """The command line, without the values of flags that are named like secrets."""
    shown: list[str] = []
    hide_next = False
    for part in argv:
        flag = _FLAG.match(part)
        is_secret = flag is not None and may_name_secret(flag[1])
        shown.append(HIDDEN if hide_next else f"--{flag[1]}={HIDDEN}" if flag and is_secret and flag[2] else part)
        hide_next = is_secret and flag is not None and not flag[2]
    return " ".join(shown)
