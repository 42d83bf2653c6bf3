"""An engine by itself, and the same engine behind InferenceRunner: `python -m tests.bench.engine
--engine vllm`.

``__main__`` is the command, ``work`` what every row does, ``offline`` and ``ours`` are the
processes that do it.
"""
