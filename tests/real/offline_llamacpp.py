"""`python -m tests.real.offline_llamacpp MODEL TEXTS.json VECTORS.npy [AT_ONCE]`: the vectors of
llama.cpp's own call.

It has one text in work at a time, so no text shares a batch with another one; with AT_ONCE so many,
in one call.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import xllamacpp

from datatrove_ckpt.config.engines.llamacpp import resolve_model_path

if __name__ == "__main__":
    model, texts, vectors, *more = sys.argv[1:]
    at_once = int(more[0]) if more else 1
    params = xllamacpp.CommonParams()
    params.model.path = str(resolve_model_path(model))
    params.embedding = True
    params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    params.n_ctx, params.n_batch, params.n_ubatch = 256 * at_once, 256, 256
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_parallel, params.kv_unified = at_once, True
    params.verbosity = 1
    engine = xllamacpp.Server(params)
    asked = json.loads(Path(texts).read_text())
    found = []
    began = time.monotonic()
    for each in [[text] for text in asked] if at_once == 1 else [asked]:
        answer = engine.handle_embeddings({"input": each})
        found += [one["embedding"] for one in answer["data"]]
    print(f"offline: {len(asked) / (time.monotonic() - began):.2f} texts/s", flush=True)
    np.save(vectors, np.array(found, np.float32))
