"""``python .../sglang_launch.py ARGUMENTS``: SGLang's server, with a key that appears in no process list and no log.

SGLang takes its key only from ``--api-key`` or from a file of settings, and prints all its settings into its log. So
this script reads the key from DATATROVE_CKPT_API_KEY, and puts it into SGLang's settings after SGLang has parsed its
arguments. Everything else is ``python -m sglang.launch_server``.

The script is started by its path and imports nothing of this package, because with ``server_python`` it runs in another
environment.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from typing import Any

_VARIABLE = "DATATROVE_CKPT_API_KEY"  # config.inference_config.API_KEY_VARIABLE


class Hidden(str):
    """A string that is printed as ``***`` with the settings that contain it.

    Only the process that answers HTTP has it: settings that are pickled for the engine's other processes contain an
    empty string instead.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, ("",)

    def __copy__(self) -> Hidden:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Hidden:
        return self


def _set_key(api_key: Hidden) -> None:
    """Make SGLang's parser of arguments add the key to the settings that it returns."""
    # ``Any`` for the module and its settings: the environment that checks our types has no SGLang.
    module: Any = importlib.import_module("sglang.srt.server_args")
    parse = module.prepare_server_args

    def parse_and_set_key(argv: list[str]) -> Any:
        settings = parse(argv)
        settings.api_key = api_key
        return settings

    module.prepare_server_args = parse_and_set_key


def main() -> None:
    # Python put this script's folder into the path, and its modules have names that other packages use, too.
    sys.path[:] = [entry for entry in sys.path if entry != os.path.dirname(os.path.abspath(__file__))]  # noqa: PTH100, PTH120
    if _VARIABLE in os.environ:
        _set_key(Hidden(os.environ.pop(_VARIABLE)))
    # As the main module, because the processes that SGLang spawns import the main module again.
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
