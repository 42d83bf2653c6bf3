"""What goes wrong is said in one clear message, with an exit code, and without losing or completing
anything.
"""

from tests.yaml_jobs import endpoint, job_yaml, write_job


def test_a_full_disk_below_the_logs_is_named(here, server, command):
    write_job(here, job_yaml(endpoint(server)), ["text"])
    (here / "logs").mkdir()
    (here / "logs/executor.json").symlink_to("/dev/full")
    said = command("run", "job.yaml", code=1)
    assert "Traceback" not in said.err
    assert f"Could not use {here / 'logs'} or {here / 'checkpoints'}: No space left" in said.error
    assert "Free some space and run again" in said.error
