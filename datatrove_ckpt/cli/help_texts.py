"""Texts of ``--help`` that stand below the options: examples, exit codes, and what the commands for editors give."""

from __future__ import annotations

EPILOG = """\
exit codes:
  0  done; for doctor, verify, repair: no problem
  1  stopped by an error, or problems were found; after run, the same command resumes
  2  a mistake in a file or on the command line; nothing was started
  3  verify: no problem, but something is not finished
  128 + n  ended by signal n, so 130 for Ctrl-C; after run, the same command resumes

datatrove-ckpt COMMAND --help tells more about each command, with examples and its exit codes.
"""

# Each is run as it stands by tests/integration/test_examples.py, in this order, below the quick start.
EXAMPLES = {
    "run": (
        "datatrove-ckpt run configs/quickstart.yaml",
        'datatrove-ckpt run configs/quickstart.yaml --dry-run --pipeline.1.rollout_fn.prompt="Summarise: {text}"',
    ),
    "doctor": ("datatrove-ckpt doctor configs/quickstart.yaml",),
    "plan": ("datatrove-ckpt plan configs/quickstart.yaml --mtbf 6h",),
    "status": ("datatrove-ckpt status quickstart/checkpoints",),
    "report": ("datatrove-ckpt report quickstart/checkpoints -o quickstart/report.html",),
    "track": ("datatrove-ckpt track monitored_run/checkpoints",),
    "verify": ("datatrove-ckpt verify quickstart/checkpoints --full",),
    "migrate": ("datatrove-ckpt migrate configs/quickstart.yaml --from datatrove/checkpoints --dry-run",),
    "repair": ("datatrove-ckpt repair quickstart/checkpoints --logging-dir quickstart/logs --dry-run",),
    "relocate": ("datatrove-ckpt relocate quickstart/checkpoints --output quickstart/output --dry-run",),
    "fork": (
        "datatrove-ckpt fork quickstart/checkpoints configs/quickstart.yaml "
        '--pipeline.1.rollout_fn.prompt="Summarise: {text}" '
        "--pipeline.1.checkpoints_local_dir=quickstart/new/checkpoints "
        "--pipeline.1.output_writer.output_folder=quickstart/new/output "
        "--executor.logging_dir=quickstart/new/logs --dry-run",
    ),
    "reshard": ("datatrove-ckpt reshard configs/quickstart.yaml --tasks 2 --dry-run",),
    "schema": ("datatrove-ckpt schema > datatrove-ckpt.schema.json",),
    "completion": ("datatrove-ckpt completion bash > datatrove-ckpt.bash",),
}

SCHEMA_EPILOG = """\
It has every argument of every class that has a short name, with its type, default and description. Editors that know
JSON schemas complete and check files with it, if the file's first line says where it is:

  # yaml-language-server: $schema=datatrove-ckpt.schema.json

exit codes:
  0  the schema is printed
  2  a mistake on the command line
"""

RESHARD_EPILOG = """\
WHAT is the YAML file of the run, with the overrides that the run had. No rank may run meanwhile. What is finished,
saved answers and output files stay. Killed at any moment, the same command goes on. Afterwards run with the new number
of tasks.

exit codes:
  0  done
  1  a rank is running, or the checkpoint, the output or the input is not as it should be; nothing was changed
  2  a mistake on the command line, or a pipeline that cannot be dealt out anew; the message says why
"""

COMPLETION_EPILOG = """\
bash: source the script in ~/.bashrc. zsh: save it as _datatrove-ckpt in a folder of $fpath. fish: save it as
~/.config/fish/completions/datatrove-ckpt.fish. Write it again after an upgrade.

exit codes:
  0  the script is printed
  2  a mistake on the command line, or shtab is not installed: pip install 'datatrove-ckpt[completion]'
"""

WHAT = """\
WHAT is a checkpoint folder (checkpoints_local_dir), its mirror (checkpoints_remote_dir: s3://, hf://, a path), or the
YAML file of the run, with the overrides that the run had:
  --pipeline.1.checkpoints_local_dir=other/checkpoints
"""

MIGRATE_EPILOG = """\
CONFIG has the input, steps, tasks, records_per_chunk, metadata_key, rollouts_per_document, model, output folder and
output_filename that datatrove's run had; FOLDER was its checkpoints_local_dir, and may be that of CONFIG. Stop that run
first, also where it waits in a queue or for its server: it takes no lock. Noticed are a process of this host that has
its files open to write, and files that change meanwhile; young files are a warning.

Finished chunks stay as they are, and finished documents of other chunks are kept. What cannot be trusted is named,
document by document, and processed again by the next run. FOLDER is not changed, unless it is the checkpoints_local_dir
of CONFIG: then what was there is moved to FOLDER/datatrove. Output that is made again is moved to the folder datatrove
in checkpoints_local_dir. Continue with: datatrove-ckpt run CONFIG

exit codes:
  0  the run is taken over (with --dry-run: could be)
  1  input, output or settings are not those of datatrove's run, or it is still on: nothing was changed; or an error
     while it was taken over: the same command goes on
  2  a mistake in CONFIG or on the command line
"""

RELOCATE_EPILOG = f"""\
{WHAT}
Stop the run, copy checkpoint and output with any tool, then relocate the copy. Every committed file is read at its new
place and compared with its commit; only if all are there and right, run.json of each rank and job.json name the new
folder. The originals are not touched. WHAT is the copy: its folder, the copied mirror, or the YAML file with the new
folders, which tells --output, too. The same command again continues if it was interrupted.

exit codes:
  0  the checkpoint belongs to its new place (with --dry-run: would)
  1  files are missing or changed there, or a rank is running; nothing was changed
  2  WHAT is no checkpoint, or a mistake on the command line
"""

FORK_EPILOG = f"""\
{WHAT}
NEW is the YAML file of the new run, with folders of its own and what is changed; or its new checkpoint folder, if the
run is a script. Overrides belong to NEW if that is a file:
  datatrove-ckpt fork job.yaml job.yaml --pipeline.1.rollout_fn.prompt="..." --pipeline.1.checkpoints_local_dir=new/...

The new run starts at the first document and pays for all of them, but for requests whose final payload is equal to one
that the other run has an answer to. It says what is kept and what the rest will cost, then makes the folder. The other
run must not be active; it is only read, and can go on afterwards.

exit codes:
  0  the folder is made (with --dry-run: would be)
  1  the other run is damaged, or one of its ranks is running
  2  WHAT is no checkpoint, NEW is not new, or a mistake in a file or on the command line
"""
