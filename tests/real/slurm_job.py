"""One job array on Slurm, from its submission to its end, as a test sees it."""

from datatrove.executor import SlurmPipelineExecutor as DatatroveExecutor

from datatrove_ckpt import SlurmPipelineExecutor
from datatrove_ckpt.testing import outputs
from tests.patience import until
from tests.real.cluster_job import DOCUMENTS, ClusterJob, pipeline, undisturbed
from tests.real.slurm_cluster import Watched, processes

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


class Job(ClusterJob):
    """One job array, from its submission to its end.

    Attributes:
        attempts: worker processes that were seen to run.
    """

    def __init__(self, cluster, folder, server, tasks=1):
        super().__init__(folder, server, tasks)
        self.cluster = cluster
        self.id = ""

    def submit(self, pulls=False, **changes):
        """Through datatrove, as a user does.

        ``pulls``: through our executor, an element for each task.
        """
        steps = pipeline(self.folder, self.server.url, **changes.pop("runner", {}))
        settings = {"time": "00:10:00", "partition": "low", "qos": "", **changes}
        settings["sbatch_args"] = {"open-mode": "append", **settings.get("sbatch_args", {})}
        kind = SlurmPipelineExecutor if pulls else DatatroveExecutor
        executor = kind(steps, self.tasks, logging_dir=str(self.folder / "logs"), **settings)
        executor.run()
        self.id = executor.array_id if pulls else executor.job_id

    def state(self, index=0):
        return self.cluster.show("job", f"{self.id}_{index}").get("JobState", "")

    def workers(self, index=0):
        """The processes that run our code in an array task, one on each node."""

        def is_it(argv, environ):
            mine = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
            program = argv[1] if len(argv) > 1 else ""
            return mine == (self.id, str(index)) and program.endswith("launch_pickled_pipeline")

        return [Watched(pid) for pid in until(lambda: processes(is_it), 120, self.describe)]

    def worker(self, index=0):
        """The process that runs our code in an array task of one node."""
        (only,) = self.workers(index)
        return only

    def until_ended(self, *states):
        """Waits for the end of all array tasks, which is to be one of ``states``."""
        for index in range(self.tasks):
            until(lambda index=index: self.state(index) in ENDED, 240, self.describe)
            assert self.state(index) in (states or ("COMPLETED",)), self.describe()

    def until_logged(self, text):
        """Waits for a line of any task, in any attempt."""
        logs = self.folder / "logs/slurm_logs"
        until(lambda: any(text in log.read_text() for log in logs.iterdir()), 240, self.describe)

    def is_complete(self, rank=0):
        """Marked complete by datatrove."""
        return (self.folder / f"logs/completions/{rank:05d}").exists()

    def describe(self):
        logs = [
            path for path in (self.folder / "logs").rglob("*") if path.suffix in (".out", ".log")
        ]
        texts = [
            f"--- {path.relative_to(self.folder)}\n{path.read_text()[-5000:]}"
            for path in sorted(logs)
        ]
        queue = self.cluster.command("squeue", "-o", "%i %T %r %R")
        return "\n".join(
            [
                super().describe(),
                queue,
                str(self.cluster.show("job", f"{self.id}_0")),
                *texts,
            ]
        )

    def check(self, at_most=0):
        """All ranks are complete, the output is that of an undisturbed run, and no more than so many
        requests were sent again.
        """
        assert outputs(self.folder / "output") == undisturbed(self.folder, self.tasks)
        self.check_requests(at_most)

    def check_requests(self, at_most):
        assert all(map(self.is_complete, range(self.tasks))), self.describe()
        documents = self.tasks * DOCUMENTS
        assert len(self.server.asked) == documents
        assert 0 <= self.asked() - documents <= at_most, self.describe()
