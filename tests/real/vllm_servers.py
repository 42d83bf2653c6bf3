"""A vLLM server on the CPU."""

import os
import signal
import subprocess
from contextlib import contextmanager

from datatrove_ckpt.inference.servers.server import free_port
from tests.real import environment

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # One thread, on any core: several servers run at once, also of several tests.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "fork",  # saves two imports of torch per start
}


@contextmanager
def vllm_server(folder, *more, model=None):
    """The address of a server that several runs use.

    ``more``: further flags. ``model``: its folder; None: SmolLM2.
    """
    port = free_port()  # none that an outgoing connection may get before the engine is loaded
    flags = [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--max-model-len",
        "1024",
        "--dtype",
        "bfloat16",
    ]
    command = [environment.vllm_python(), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", model or environment.model()]
    with (folder / "server.log").open("wb") as log:
        arguments = [*command, *flags, "--enforce-eager", "--max-num-seqs", "16", *more]
        environ = {**os.environ, **ENVIRONMENT}
        server = subprocess.Popen(
            arguments, env=environ, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{port}"  # the runs wait until it answers
    finally:
        os.killpg(server.pid, signal.SIGKILL)  # SIGTERM takes it minutes, at times
        server.wait()
