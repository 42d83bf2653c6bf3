"""`datatrove-ckpt tune` on this machine's GPUs, in eight minutes: `python -m tests.bench.tune_gpu`.

The model is a Llama of 1.2 billion random weights, which no file holds, and its tokens are bytes:
nothing is downloaded. What vLLM or a GPU lacks is said, and nothing is measured.

--python PYTHON   of vLLM's environment
--seconds 480     after which the tune is stopped; called again with the same folder, it goes on
--folder FOLDER   where the job is kept
--small           a tiny model, also without a GPU, to try this script
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import yaml

_LOOK = """
import vllm, torch
print(vllm.__version__, torch.cuda.device_count())
"""
_MAKE = """
import json, sys
from pathlib import Path
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
folder, config = Path(sys.argv[1]), json.loads(sys.argv[2])
words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>"]
tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
template = "{% for message in messages %}{{ message.content }}{% endfor %}"
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=template
).save_pretrained(folder)
(folder / "config.json").write_text(json.dumps(config))
"""
_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 256,
    "eos_token_id": 257,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 258,
}
_SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def why_not(python, is_small):
    """What is missing to measure; "" if nothing is."""
    looked = subprocess.run([python, "-c", _LOOK], capture_output=True, text=True, check=False)
    if looked.returncode:
        last = (looked.stderr.strip().splitlines() or ["no message"])[-1]
        return f"{python} cannot import vllm: {last}"
    version, gpus = looked.stdout.split()[-2:]
    print(f"vLLM {version}, {gpus} GPUs", flush=True)
    if gpus == "0" and not is_small:
        return "this machine shows no GPU"
    return ""


def write_job(folder, python, is_small):
    model = folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    config = {**_MODEL, **(_SMALL if is_small else {})}
    subprocess.run([python, "-c", _MAKE, str(model), json.dumps(config)], check=True)
    layer = config["hidden_size"] * (2.5 * config["hidden_size"] + 3 * config["intermediate_size"])
    size = 2 * int(config["num_hidden_layers"] * layer)
    index = {"metadata": {"total_size": size}, "weight_map": {}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    chance = random.Random(1)
    rows = 40 if is_small else 1000
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(rows):
            text = " ".join(str(chance.random()) for _ in range(chance.randrange(5, 60)))
            file.write(json.dumps({"id": str(number), "text": text}) + "\n")
    flags = {"load-format": "dummy", "enforce-eager": True}
    if is_small:
        flags |= {"dtype": "bfloat16", "max-num-seqs": 1}
    job = {
        "run_folder": str(folder / "run"),
        "input": str(folder / "rows.jsonl"),
        "prompt": "{text}",
        "model": str(model),
        "server_type": "vllm",
        "server_python": python,
        "model_kwargs": flags,
        "model_max_context": 2048,
        "default_generation_params": {"max_tokens": 128, "ignore_eos": True, "temperature": 0},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return rows


def main():
    parser = argparse.ArgumentParser(prog="tests.bench.tune_gpu")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--folder", type=Path, default=Path("tune_gpu"))
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    missing = why_not(options.python, options.small)
    if missing:
        print(f"Nothing was measured: {missing}.")
        return 1
    folder = options.folder.absolute()
    rows = write_job(folder, options.python, options.small)
    ours = [sys.executable, "-m", "datatrove_ckpt"]
    job = str(folder / "job.yaml")
    subprocess.run([*ours, "doctor", job], check=False)
    tune = [*ours, "tune", job, f"--sample={rows}"]
    if options.small:
        tune.append("--try={model_kwargs: {max-num-seqs: 16}}")
    try:
        return subprocess.run(tune, check=False, timeout=end - time.monotonic()).returncode
    except subprocess.TimeoutExpired:
        print(f"The time is over; the same command goes on from {folder}.")
        return 1


if __name__ == "__main__":
    sys.exit(main())
