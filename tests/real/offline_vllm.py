"""`python tests/real/offline_vllm.py MODEL TEXTS.json VECTORS.npy`: the vectors of vLLM's own LLM.embed."""

import json
import sys
import time
from pathlib import Path

import numpy as np
from vllm import LLM

if __name__ == "__main__":
    model, texts, vectors = sys.argv[1:]
    engine = LLM(model, runner="pooling", convert="embed", dtype="float32", enforce_eager=True, max_model_len=1024)
    asked = json.loads(Path(texts).read_text())
    began = time.monotonic()
    answers = engine.embed(asked, use_tqdm=False)
    print(f"offline: {len(asked) / (time.monotonic() - began):.1f} texts/s", flush=True)
    np.save(vectors, np.array([answer.outputs.embedding for answer in answers], np.float32))
