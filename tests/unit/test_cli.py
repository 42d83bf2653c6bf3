"""The command: exit codes, overrides, and errors without tracebacks."""

import os
import sys
from pathlib import Path

import pytest
from datatrove.executor import RayPipelineExecutor

from datatrove_ckpt.cli.main import main
from datatrove_ckpt.cli.short_form import read_config
from tests import golden, processes
from tests.rank_folders import write_rank
from tests.yaml_jobs import job_yaml, write_job

_INFERENCE = "      - class_path: InferenceRunner\n"
JOB = job_yaml("server_type: dummy, model_name_or_path: m").replace(
    _INFERENCE, f"      - {{class_path: my_steps.Step, init_args: {{end: done}}}}\n{_INFERENCE}"
)

STEPS = """
from pathlib import Path
from datatrove.pipeline.base import PipelineStep
from datatrove_ckpt.errors import CheckpointMismatch

class Step(PipelineStep):
    name, type = "Step", "test"

    def __init__(self, end: str = "done", size: int = 1):
        super().__init__()
        self.end, self.size = end, size

    def run(self, data, rank=0, world_size=1):
        password = "hunter2"
        Path(f"seen-{rank}").write_text(f"{self.size} of {world_size}")
        if self.end == "own":
            raise CheckpointMismatch("The prompt is another one.")
        if self.end == "wrapped":
            try:
                raise CheckpointMismatch("The prompt is another one.")
            except CheckpointMismatch as error:
                raise RuntimeError("a task failed") from error
        if self.end == "interrupt":
            raise KeyboardInterrupt
        if self.end == "disk":
            open("missing/file")
        if self.end == "bug":
            raise RuntimeError(f"a bug {len(password)}")
        return ()
"""


PATHS = os.pathsep.join([".", *filter(None, sys.path)])


@pytest.fixture
def run(tmp_path, monkeypatch):
    """``datatrove-ckpt run job.yaml ...`` in this process, in a folder with JOB, its step and one
    document.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_steps", raising=False)
    write_job(tmp_path, JOB, ["Rain falls."])
    Path("my_steps.py").write_text(STEPS)
    return lambda *arguments: main(["run", "job.yaml", *arguments])


@pytest.mark.parametrize(
    "end, code, said",
    [
        ("done", 0, ""),
        ("disk", 1, "error: [Errno 2] No such file or directory: 'missing/file'\n"),
        ("interrupt", 130, "interrupted by SIGINT. To resume: datatrove-ckpt run job.yaml "
         "--pipeline.1.end=interrupt\n"),
    ],
)  # fmt: skip
def test_the_exit_code_and_the_last_line_say_how_a_run_ended(run, capsys, end, code, said):
    assert run(f"--pipeline.1.end={end}") == code
    assert capsys.readouterr().err.endswith(said)
    assert Path("logs/completions/00000").exists() == (code == 0)


@pytest.mark.parametrize("override", golden.sections("overrides"))
def test_where_text_is_taken_a_value_of_the_command_line_is_that_text(run, override):
    node = read_config("job.yaml", [override])["executor"]
    for key in override.partition("=")[0].removeprefix("--").removeprefix("executor.").split("."):
        node = node.get("init_args", node) if isinstance(node, dict) else node
        node = node[int(key)] if isinstance(node, list) else node[key]
    golden.hold("overrides", override, repr(node))


@pytest.mark.slow
def test_an_input_that_another_executor_has_yet_to_make_is_not_looked_for(run):
    first = "{class_path: LocalPipelineExecutor, init_args: {pipeline: [], logging_dir: first, workers: 1}}"
    assert run("--pipeline.0.data_folder=later", f"--executor.depends={first}") == 0


@pytest.mark.parametrize("end", ["own", "wrapped"])
def test_our_errors_are_1_and_a_message_and_their_traceback_is_in_the_task_log(run, capsys, end):
    assert run(f"--pipeline.1.end={end}") == 1
    said = capsys.readouterr().err
    assert said.endswith("\nerror: The prompt is another one.\n")
    assert said.count("The prompt is another one.") == 1
    assert "Traceback" not in said
    logged = Path("logs/logs/task_00000.log").read_text()
    assert "ERROR    | datatrove.executor.base:_run_for_rank" in logged
    assert "Traceback" in logged
    assert "CheckpointMismatch: The prompt is another one." in logged
    assert not Path("logs/completions/00000").exists()


@pytest.mark.matrix(
    "module, interrupt",
    [
        ("datatrove", "signal.raise_signal(signal.SIGINT)"),
        ("datatrove", "type('Class', (), {'name': Name()})"),
        ("datatrove_ckpt.cli.run", "signal.raise_signal(signal.SIGINT)"),
    ],
)
def test_ctrl_c_while_the_command_imports_is_no_traceback(tmp_path, module, interrupt):
    (tmp_path / "sitecustomize.py").write_text(f"""
import signal, sys

class Name:
    def __set_name__(self, owner, name):
        signal.raise_signal(signal.SIGINT)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            {interrupt}

sys.meta_path.insert(0, Finder())
""")
    (tmp_path / "job.yaml").write_text(
        "executor: {class_path: LocalPipelineExecutor, init_args: {pipeline: []}}\n"
    )
    command = [Path(sys.executable).with_name("datatrove-ckpt"), "run", "job.yaml"]
    ended = processes.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": PATHS})
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


_OF_A_RUN = {
    *("aiohttp", "httptools", "pyarrow", "datasets", "prometheus_client", "mlflow"),
    *("datatrove_ckpt.inference", "datatrove_ckpt.run_folder", "datatrove_ckpt.generation.rank"),
    *("datatrove_ckpt.checkpoint.open_checkpoint", "datatrove_ckpt.generation.prometheus"),
    *("datatrove_ckpt.mirror.restore", "datatrove_ckpt.cli.execution"),
}
_OF_A_FILE = {"datatrove_ckpt.cli", "datatrove_ckpt.readers", "datatrove_ckpt.checkpoint.recovery"}
# Of Python itself; each takes 10 ms or more.
_SLOW = {"asyncio", "email", "http.client", "multiprocessing", "sqlite3", "ssl", "subprocess"}
_OF_OTHERS = {"aiohttp", "datatrove", "fsspec", "loguru", "numpy", "pyarrow", "yaml"}
_COMMAND = "from datatrove_ckpt.cli.main import main\ntry: main({})\nexcept SystemExit: pass"


@pytest.mark.matrix(
    "code, later",
    golden.values("late_imports", globals()),
)
def test_what_is_needed_later_is_not_imported(tmp_path, code, later):
    """So ``--version`` takes a tenth of a second, and ``status`` two of them."""
    write_rank(tmp_path / "checkpoints", chunks=1, journal=2)
    code += f"\nimport sys; sys.exit(', '.join({later!r} & set(sys.modules)) or 0)"
    ended = processes.run([sys.executable, "-c", code], cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_a_notebook_that_changes_its_folder_after_the_import_finds_the_input_there(tmp_path):
    """fsspec keeps a relative folder as it was when it was named first."""
    code = "import os; from datatrove_ckpt import run; from datatrove.io import get_datafolder\n"
    code += f"os.chdir({str(tmp_path)!r}); print(get_datafolder('.').resolve_paths(''))"
    assert processes.run([sys.executable, "-c", code]).stdout.strip() == str(tmp_path)


@pytest.mark.slow
def test_what_ends_a_task_on_a_cluster_is_said_once(run):
    assert run("--pipeline.1.end=own") == 1
    task = """
import pickle
from datatrove.executor import LocalPipelineExecutor
from datatrove_ckpt.process.task_errors import QuietErrors
from my_steps import Step
executor = LocalPipelineExecutor([Step("own")], logging_dir="elsewhere", workers=1)
executor._quiet = pickle.loads(pickle.dumps(QuietErrors(said_later=True)))
executor._run_for_rank(0)
"""
    ended = processes.run([sys.executable, "-c", task], env={**os.environ, "PYTHONPATH": PATHS})
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("The prompt is another one.") == 1


@pytest.mark.parametrize("ran_before", [False, True])
def test_tasks_of_ray_that_failed_without_a_word_are_1(run, capsys, monkeypatch, ran_before):
    """Also where all tasks have markers of the run before, as in a retry of dead letters."""
    tasks = "    tasks: 3\n    skip_completed: false" if ran_before else "    tasks: 3"
    Path("job.yaml").write_text(
        JOB.replace("Local", "Ray").replace("    tasks: 1\n    workers: 1", tasks)
    )
    for rank in range(3 * ran_before):
        marker = Path(f"logs/completions/{rank:05d}")
        marker.parent.mkdir(parents=True, exist_ok=True)
        marker.touch()
        os.utime(marker, (1e9, 1e9))
    monkeypatch.setattr(
        RayPipelineExecutor, "run", lambda executor: executor.mark_rank_as_completed(0)
    )
    assert run() == 1
    logs = Path("logs/logs").absolute()
    assert capsys.readouterr().err.endswith(
        f"error: 2 of 3 tasks are not complete; task 1 is the first. Their logs are in {logs}. Run again to "
        "resume.\n"
    )


def test_a_bug_keeps_its_traceback_but_shows_no_values_of_variables(run, capsys):
    with pytest.raises(RuntimeError, match="a bug 7"):
        run("--pipeline.1.end=bug")
    for text in (capsys.readouterr().err, Path("logs/logs/task_00000.log").read_text()):
        assert "Traceback" in text
        assert "hunter2" not in text


@pytest.mark.parametrize(
    "arguments, code, says",
    golden.values("command_lines", globals()),
)
def test_the_command_line_itself(capsys, arguments, code, says):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == code
    said = capsys.readouterr()
    assert says in said.out + said.err


@pytest.mark.parametrize("what", [["report"], ["repair"], ["export", "x.csv"]])
def test_a_command_that_takes_no_training_says_which_do(what, tmp_path, capsys):
    (tmp_path / "step-00000001").mkdir()
    name, *rest = what
    assert main([name, str(tmp_path), *rest]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path} is a training's folder: use status, show or verify." in said


def test_a_run_folder_on_a_read_only_disk_is_told_with_what_to_do(run, capsys, monkeypatch):
    def refuse(path, *arguments, **options):
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    assert run() == 1
    assert "Read-only file system. Give this user the permission" in capsys.readouterr().err


@pytest.mark.parametrize("what", [["status"], ["show"], ["show", "--dead"], ["verify"]])
def test_a_run_of_another_user_is_told_with_what_to_do(what, tmp_path, capsys, monkeypatch):
    """Folders of ranks are private, and that of all ranks is not."""
    write_rank(tmp_path, chunks=1)
    works = os.stat

    def stat(path, **options):
        if f"{path}".startswith(f"{tmp_path}/00000/"):
            raise PermissionError(13, "Permission denied", str(path))
        return works(path, **options)

    monkeypatch.setattr(os, "stat", stat)  # as the system does; root may look everywhere
    assert main([*what, str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"Could not use {tmp_path}/00000/" in said
    assert "Permission denied. Run this as the user who made the checkpoints" in said


def test_what_an_ascii_terminal_cannot_show_is_escaped():
    code = "from datatrove_ckpt.cli import printing\nprinting.say(chr(233))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    found = processes.run([sys.executable, "-c", code], env=environment)
    assert found.stdout == "\\xe9\n", found.stderr
