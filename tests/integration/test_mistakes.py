"""Mistakes that people make: an exact line answers each, and the exit code is not 0."""

import json
import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from datatrove.pipeline.writers import JsonlWriter, ParquetWriter

import datatrove_ckpt
from datatrove_ckpt import (
    InferenceConfig,
    LocalPipelineExecutor,
    SlurmPipelineExecutor,
    rollouts,
)
from datatrove_ckpt.cli import job_input
from datatrove_ckpt.cli.main import main
from datatrove_ckpt.config.generation_params import refuse_near_misses
from datatrove_ckpt.config.inference_config import models_of
from datatrove_ckpt.output.writer_checks import check_writer, refuse_equal_folders
from datatrove_ckpt.process.preemption_notices import check_notice
from datatrove_ckpt.readers import JsonlReader
from datatrove_ckpt.testing import FakeServer
from datatrove_ckpt.torch import EverySeconds, EverySteps, Last, Mix, Pack, ReaderDataset, dataset
from tests import golden
from tests.jobs import runner
from tests.rollouts import asked, document
from tests.stateful_rows import Rows

LINES = """
run job.yaml --default-generation-params '{max_token: 5}'
run job.yaml --default-generation-params '{maxTokens: 5}'
run job.yaml --generation-params '{Temperature: 0.5}'
run job.yaml --generation-params '{max_tokens: "5"}'
run --input documents --rollout mine.token --endpoint URL --model m --run-folder runs/y
run --input documents --rollout mine.message --endpoint URL --model m --run-folder runs/y
run --input documents --rollout mine.text --endpoint URL --model m --run-folder runs/y
run --input documents --rollout mine.plain --endpoint URL --model m --run-folder runs/y
run --input documents --rollout mine.one --endpoint URL --model m --run-folder runs/y
run --input documents --rollout mine --endpoint URL --model m --run-folder runs/y
run --input documents --endpoint URL --model m --run-folder runs/y
run --prompt 'Say {text}' --endpoint URL --model m --run-folder runs/y
run --config job.yaml
run job.yaml --json
run job.yaml --full
run job.yaml --resume
run job.yaml --dry_run
run job.yaml --samples 3
run job.yaml --dry-run true
run job.yaml --keep-answers
run job.yaml --keep-answers yes
run job.yaml --num-workers 2
run job.yaml --max-concurrency 8
run job.yaml --threads 8
run job.yaml --parallel 8
run job.yaml --batch-size 8
run job.yaml --url URL
run job.yaml --out out.jsonl
run job.yaml --output-folder out
run job.yaml --data documents
run job.yaml --max-new-tokens 60
run job.yaml --max-model-len 4096
run job.yaml --rollouts 3
run job.yaml --key sk-abc
run job.yaml --limit 2,5
run job.yaml --max-tokens 1,000
run job.yaml --temperature 0,7
run job.yaml --choice yes,no
run job.yaml --input documents/a.jsonl,documents/b.jsonl
run job.yaml --input documents/a.jsonl documents/b.jsonl
run job.yaml --input ../documents
run job.yaml --input cases
run job.yaml --input semicolons.csv
run job.yaml --input latin.csv
run job.yaml --input array.json
run job.yaml --prompt prompt.txt
run job.yaml --system-prompt prompt.txt
run job.yaml --json-schema schema.json
run job.yaml --prompt @promt.txt
run job.yaml --prompt 'Say {txt}'
run job.yaml --prompt 'Say $text'
run job.yaml --prompt 'Answer as {"a": 1}: {text}'
run job.yaml --checkpoints-local-dir c
run job.yaml --logging-dir logs
run job.yaml --tp 4 --endpoint null --model Qwen/Qwen3-4B
run job.yaml --endpoint null --model gpt-4o
run job.yaml --endpoint localhost:8000
run job.yaml --output-format xlsx
run job.yaml --on-document-error skip
run job.yaml --tasks=many
run job.yaml --prompt=null
run job.yaml --prompt=null '--promtp=Say {text}'
run job.yaml --prompt=null --server-type=dummy
run job.yaml --system-prompt=@nowhere.txt
run job.yaml --input=twice
run job.yaml --input=linked
run job.yaml --max-tokens=5 '--default-generation-params={max_tokens: 6}'
run job.yaml --input=documents/a.csv
run job.yaml --input=mixed
run job.yaml --input=backup
run job.yaml --input=dict
run job.yaml --input=pictures
run job.yaml --input=table/a.tsv
run job.yaml --input=table/b.xlsx
run job.yaml --input=table/c.warc.gz
run job.yaml --input=table/d.zip
run job.yaml --input=table/e.sqlite
run job.yaml --input=scans
run job.yaml --input=nowhere/
run job.yaml --rollout=my.rollout
run job.yaml --model=null
run job.yaml --run-folder=s3://b/x
run job.yaml --run-folder=hf://buckets/a/b/x --jobs={} --slurm={}
run job.yaml --jobs.tasks=8
run job.yaml --slurm={} --workers=3
run job.yaml --task=embedd
run job.yaml --task=embed --rollout=chat
run job.yaml --task=embed --max-tokens=5
run job.yaml --prompt=null --task=batch --input=hf://datasets/o/n
run job.yaml --task=classify --dimensions=5
run job.yaml --api-key=sk-1
run job.yaml --max-tokens=
run job.yaml --limit=2 --limit 3
run job.yaml --limit=0
run job.yaml --concurrency=8
run job.yaml --max-completion-tokens=8
run job.yaml --base-url=http://x
run job.yaml --endpoints '[{url: http://x}]'
run job.yaml --endpoint null --endpoints '[http://x]'
run job.yaml --endpoint null --endpoints '{url: http://x}'
run job.yaml --endpoint null --endpoints '[]'
run job.yaml --endpoint null --model null --endpoints '[{url: http://x}]'
run job.yaml --tensor-parallel-size=4
run job.yaml --json-schema=@nowhere.json
run job.yaml --json-schema=@semicolons.csv
run job.yaml --run-folder
run job.yaml --limit --prompt x
run job.yaml b.jsonl c.jsonl
run job.yaml --prompt.x=1
run job.yaml --top-k 5
run job.yaml --carried-parts 2
run job.yaml --rollout words.tell --prompt null --max-chars 9
run job.yaml --rollout ./words.py:tell --prompt null
run job.yaml --rollout words.py --prompt null
run job.yaml --choice 'Sport, News'
run job.yaml --monitoring '{port: 9}'
run long.yaml --model m
run tabs.yaml
run unquoted.yaml
run job
run documents
run documents/a.jsonl
run --input documents/a.jsonl documents/a.jsonl --prompt {text}
run job.yaml --temperature 0 --generation-params '{temperature: 1}'
run job.yaml --sampel 5
verify runs/x --executor.tasks=4
verify runs/x --ful
track runs/x --wandb team/texts
status runs/nothere
export runs/x answers.xlsx
run job.yaml --prompt=null --rollout m/f.rollout
run job.yaml --prompt=null --rollout ../m/f.py:rollout
run job.yaml --prompt=null --rollout JudgeRolout --judge-prompt {text}
run job.yaml --slurm '{nodes: 4}'
run job.yaml --jobs '{hardware: a10g}'
run job.yaml --requests-per-minute 60
run job.yaml --sampling '{temperature: 0}'
run job.yaml --on-cut-off '{retries: 2}'
run job.yaml --json-schema '{"type": "object"'
run job.yaml --default-generation-params '{"a" 1}'
run job.yaml --input ''
run job.yaml --force
run job.yaml -n 3
runn job.yaml --n 3
""".strip().splitlines()

STRAYS = """
backup/README.md backup/a.jsonl backup/b.jsonl.bak dict/dataset_dict.json linked/a.jsonl mixed/a.jsonl mixed/b.csv
pictures/README.md pictures/a.svg scans/a.pdf scans/b.png scans/b.svg table/a.tsv table/b.xlsx table/c.warc.gz table/d.zip table/e.sqlite
twice/a.jsonl twice/a.jsonl.gz
"""
"""Empty files of kinds that do not go together."""
MINE = """
def ask(generate, **payload):
    return generate(payload)

async def token(document, generate):
    return await ask(generate, messages=[{"role": "user", "content": "x"}], max_token=5)

async def message(document, generate):
    return await ask(generate, message=[{"role": "user", "content": document.text}])

async def text(document, generate):
    return await generate(document.text)

def plain(document, generate):
    return "x"

async def one(document):
    return "x"
"""


@pytest.fixture
def job(here, server, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.syspath_prepend(here)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # another test's
    row = json.dumps({"id": "1", "text": "a"})
    files = {
        "mine.py": MINE,
        "semicolons.csv": "id;text\n1;a\n",
        "array.json": f"[\n{row}]",
        "long.yaml": "executor: {}",
        "tabs.yaml": "run_folder: runs/x\nslurm:\n\tpartition: gpu\n",
        "unquoted.yaml": "run_folder: runs/x\nprompt: Topic: {text}\n",
        "documents/a.jsonl": row,
        "cases/a.jsonl": row,
        "cases/b.JSONL": row,
        **dict.fromkeys(STRAYS.split(), ""),
    }
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    Path("linked/there").symlink_to("../cases")
    Path("latin.csv").write_bytes("id,text\n1,café\n".encode("latin-1"))
    settings = {"prompt": "Say {text}", "endpoint": server.url, "model": "m"}
    settings |= {"run_folder": "runs/x", "input": "documents"}
    Path("job.yaml").write_text(yaml.safe_dump(settings))


@pytest.mark.usefixtures("job")
def test_a_mistake_is_answered_by_a_line_about_it(server, capfd):
    for line in LINES:
        try:
            code = main(shlex.split(line.replace("URL", server.url)))
        except SystemExit as error:  # argparse's
            code = error.code
        said = capfd.readouterr().err
        assert code in (1, 2), line
        told = re.search(r"^(?:datatrove-ckpt[a-z ]*: )?error: .*", said, re.MULTILINE | re.DOTALL)[
            0
        ]
        suffixes = ", ".join(job_input._SUFFIXES)
        golden.hold("mistakes", line, f"{code} {told}", URL=server.url, SUFFIXES=suffixes)


def test_a_file_that_is_gone_before_its_task_starts_is_named(here, command):
    Path("documents").mkdir()
    for name in "abc":
        Path(f"documents/{name}.jsonl").write_text(json.dumps({"id": name, "text": name}))

    def answer(payload, times):
        Path("documents/b.jsonl").unlink(missing_ok=True)
        return "x"

    with FakeServer(answer) as server:
        job = f"run --input documents --prompt {{text}} --model m --endpoint {server.url} --run-folder runs/x --tasks 3"
        said = command(*job.split(), code=1).error
        again = command(*job.split(), code=1).error
    assert "The input file 'b.jsonl'" in said
    assert "is gone since this run began" in said
    assert "The input file of task 2 was gone before its start." in again


def config(kind="vllm", **settings):
    if kind == "endpoint" and "endpoints" not in settings:
        settings.setdefault("endpoint_url", "http://127.0.0.1:1")
    return InferenceConfig(kind, "m", **settings)


SERVER = SimpleNamespace(url="http://127.0.0.1:1")


def made(server=SERVER, rollout=rollouts.chat, **settings):
    return runner(Path(), server, rollout, **settings)


def given(rows):
    """A run of these rows."""
    job = {"prompt": "{text}", "model": "m", "endpoint": SERVER.url, "run_folder": "runs/x"}
    return datatrove_ckpt.run(input=rows, **job)


def packed(rows, *columns, **options):
    return [*Pack(Rows(rows), 4, [*columns] or ["input_ids"], **options)]


NAMES = {
    name: each
    for each in (
        *(
            asked,
            check_notice,
            check_writer,
            config,
            document,
            given,
            import_module,
            made,
            models_of,
            packed,
            dataset.parse_window,
            refuse_equal_folders,
            refuse_near_misses,
        ),
        *(EverySeconds, EverySteps, Last, Mix, Pack, ReaderDataset, Rows),
        *(FakeServer, InferenceConfig, JsonlReader, JsonlWriter, LocalPipelineExecutor),
        *(ParquetWriter, Path, SlurmPipelineExecutor),
    )
    for name in [each.__name__]
}


@pytest.mark.parametrize("code", golden.sections("mistakes_in_python"))
def test_a_mistake_in_python_is_answered_by_a_text_about_it(code, here):
    Path("runs").mkdir()
    Path("rows").mkdir()
    Path("rows/a.jsonl").write_text(json.dumps({"text": "a"}))
    golden.refuse("mistakes_in_python", code, vars(rollouts) | NAMES)
    assert not [*Path("runs").rglob("*.jsonl")]
