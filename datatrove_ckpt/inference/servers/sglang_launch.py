"""``python .../sglang_launch.py ARGUMENTS``: SGLang's server, with a key that no process list and no log shows.

SGLang takes its key from ``--api-key`` or a file of settings only, and prints all its settings into its log. So this
reads the key from DATATROVE_CKPT_API_KEY, and puts it where SGLang keeps its settings, once it has read its arguments.
The rest is ``python -m sglang.launch_server``.

It is started by its path, and imports nothing of this package: with ``server_python`` it runs in another environment.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from typing import Any

_VARIABLE = "DATATROVE_CKPT_API_KEY"  # engines.API_KEY_VARIABLE


class Hidden(str):
    """A text that shows as ``***`` in what is printed of the settings that hold it.

    It stays in the process that answers HTTP: the engine's other processes are given settings without it.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"

    def __reduce__(self) -> tuple[Any, ...]:
        return str, ("",)

    def __copy__(self) -> Hidden:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Hidden:
        return self


def _give_key(api_key: Hidden) -> None:
    module: Any = importlib.import_module("sglang.srt.server_args")
    read = module.prepare_server_args

    def read_with_key(argv: list[str]) -> Any:
        settings = read(argv)
        settings.api_key = api_key
        return settings

    module.prepare_server_args = read_with_key


def main() -> None:
    # This folder is in the path, because the script lies in it, and its modules have names that others have, too.
    sys.path[:] = [place for place in sys.path if place != os.path.dirname(os.path.abspath(__file__))]  # noqa: PTH100, PTH120
    if _VARIABLE in os.environ:
        _give_key(Hidden(os.environ.pop(_VARIABLE)))
    # In its place as the main module: the processes that it spawns import that anew.
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
