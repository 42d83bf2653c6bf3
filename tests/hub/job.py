"""A small job whose output goes to a repository on the fake hub, and the commands that people give
for it.
"""

from contextlib import contextmanager

from tests.commands import Command
from tests.yaml_jobs import ENDPOINT, job_yaml, write_job

"""``datatrove-ckpt ARGUMENTS``; it must end with the exit code ``code``."""


@contextmanager
def hub_job(folder, hub, server, patch, capture):
    """Commands in a folder with job.yaml, a job of two tasks and three files of org/data."""
    patch.chdir(folder)
    text = job_yaml(
        ENDPOINT.replace("URL", server.url), tasks=2, output="hf://datasets/org/data/part"
    )
    write_job(folder, text + "          records_per_chunk: 2\n", ["a", "b", "c"], ["d"])

    def run(*arguments, code=0):
        said = Command(capture)(*arguments, code=code)
        assert hub.token not in said
        assert "Traceback" not in said
        return said

    yield run
