"""`python tests/real/offline_vllm.py MODEL TEXTS.json VECTORS.npy [DTYPE]`: the vectors of vLLM's
own LLM.embed.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
from vllm import LLM

if __name__ == "__main__":
    model, texts, vectors, *more = sys.argv[1:]
    settings = {
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 64,
        "dtype": more[0] if more else "float32",
    }
    engine = LLM(model, runner="pooling", convert="embed", **settings)
    asked = json.loads(Path(texts).read_text())
    began = time.monotonic()
    answers = engine.embed(asked, use_tqdm=False)
    print(f"offline: {len(asked) / (time.monotonic() - began):.1f} texts/s", flush=True)
    np.save(vectors, np.array([answer.outputs.embedding for answer in answers], np.float32))
