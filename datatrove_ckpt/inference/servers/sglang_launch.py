"""Starts SGLang's server with a key that is in no process list or log.

SGLang takes its key only from ``--api-key`` or a file, and logs all its settings. So this script
(``python .../sglang_launch.py ARGUMENTS``) puts the key from DATATROVE_CKPT_API_KEY into the parsed
settings. With ``server_python`` the script runs in another environment, so it does not import this
package.
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

    A pickle for the engine's other processes has an empty string: only the process that answers
    HTTP has the key.
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
    # Our type checks run without SGLang.
    module: Any = importlib.import_module("sglang.srt.server_args")
    parse = module.prepare_server_args

    def parse_and_set_key(argv: list[str]) -> object:
        settings = parse(argv)
        settings.api_key = api_key
        return settings

    module.prepare_server_args = parse_and_set_key


def main() -> None:
    # This script's folder is in sys.path, where its modules would shadow other packages.
    own_folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
    sys.path[:] = [entry for entry in sys.path if entry != own_folder]
    if _VARIABLE in os.environ:
        _set_key(Hidden(os.environ.pop(_VARIABLE)))
    # As the main module, which SGLang's spawned processes import again.
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
