"""A real Slurm of two nodes on this machine: ``with Cluster(folder) as cluster``. Needs root, and
Debian's packages.

    folder/slurm.conf, log/, state/, spool/, munge/

All of it, jobs included, runs in a PID namespace whose first process waits on a pipe from this one.
However this process ends, kill -9 included, the pipe closes, that process ends, and the kernel
kills whatever is in the namespace. Everything listens on 127.0.0.1. Nothing of the machine's own
Slurm or munge is read or written.
"""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

from datatrove_ckpt.inference.servers.server import free_port
from tests.patience import until
from tests.processes import run
from tests.real.environment import DEBIAN, install_debian

NODES = ("n1", "n2")
KILL_WAIT = 60

_CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={controller_port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/munge.socket,cred_expire=5
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
DependencyParameters=kill_invalid_depend
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait={kill_wait}
MessageTimeout=15
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
{nodes}
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 State=UP PriorityTier=1 GraceTime=0
PartitionName=high Nodes=ALL MaxTime=INFINITE DefaultTime=10 State=UP PriorityTier=10 PreemptMode=OFF
"""
_NODE = (
    "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 Boards=1 SocketsPerBoard=1 "
    "CoresPerSocket=4 ThreadsPerCore=1 RealMemory=64000 Gres=gpu:4 State=UNKNOWN"
)


def install():
    if not all(shutil.which(program) for program in ("slurmctld", "slurmd", "sbatch", "munged")):
        install_debian(DEBIAN["slurmctld"])


class Cluster:
    """Slurm's controller and two nodes of four processors each.

    Partitions: low, and high above it.
    """

    def __init__(self, folder):
        self.folder = folder
        self.config = folder / "slurm.conf"
        self._namespace = None

    def __enter__(self):
        install()
        self._write_config()
        # Nodes are found by their names, as on a cluster.
        inside = [
            "bash",
            "-c",
            'mount --bind "$0" /etc/hosts && echo && read -r line',
            str(self.folder / "hosts"),
        ]
        self._namespace = subprocess.Popen(
            ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *inside],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert self._namespace.stdout is not None
            assert self._namespace.stdout.readline(), "unshare failed: a PID namespace needs root"
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        assert self._namespace is not None
        # Returns when the kernel has killed everything inside. A line, and not the pipe's end: forked
        # processes of other tests have the pipe, too.
        self._namespace.communicate(b"\n")

    def _write_config(self):
        for name in ("munge", "state", "log", "run", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True, mode=0o755)
        key = self.folder / "munge/munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        hosts = Path("/etc/hosts").read_text() + "".join(f"127.0.0.1 {node}\n" for node in NODES)
        (self.folder / "hosts").write_text(hosts)
        host = socket.gethostname().split(".")[0]
        nodes = "\n".join(_NODE.format(name=name, host=host, port=free_port()) for name in NODES)
        settings = {
            "folder": self.folder,
            "host": host,
            "controller_port": free_port(),
            "kill_wait": KILL_WAIT,
        }
        for number in range(4):
            (self.folder / f"gpu{number}").touch()  # Slurm counts device files
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-3]\n")
        self.config.write_text(_CONFIG.format(nodes=nodes, **settings))

    def _start(self):
        munge = self.folder / "munge"
        self._inside(
            "munged",
            "--force",  # its socket lies in a folder that nobody else may enter: that is meant
            f"--key-file={munge}/munge.key",
            f"--socket={munge}/munge.socket",
            f"--seed-file={munge}/munge.seed",
            f"--pid-file={self.folder}/run/munged.pid",
            f"--log-file={self.folder}/log/munged.log",
        )
        self._inside("slurmctld", "-f", str(self.config), "-c")
        for node in NODES:
            self.start_node(node)
        until(lambda: all(self.node_state(node) == "IDLE" for node in NODES), 120, self.logs)

    def start_node(self, node):
        self._inside("slurmd", "-f", str(self.config), "-N", node)

    def kill_node(self, node):
        """kill -9 of its slurmd alone, as when it is out of memory: what it started continues."""
        for pid in processes(lambda argv, _: argv[0].endswith("slurmd") and argv[-1:] == [node]):
            os.kill(pid, signal.SIGKILL)

    def node_state(self, node):
        return self.show("node", node).get("State", "")

    def _inside(self, *command):
        assert self._namespace is not None
        pid = self._namespace.pid
        first = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
        # A terminal's Ctrl-C goes to pytest, which then ends all this in order.
        entered = ["nsenter", "--target", first, "--pid", "--mount", "--", *command]
        done = run(entered, env=self.environment(), start_new_session=True)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}{self.logs()}"

    def environment(self):
        """What Slurm's commands need, and jobs inherit: this interpreter's programs, and this
        checkout's modules.
        """
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        root = str(Path(__file__).parents[2])
        own = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM_", "DATATROVE_"))
        }
        return {**own, "PATH": path, "PYTHONPATH": root, "SLURM_CONF": str(self.config)}

    def command(self, *command, check=True):
        """A command's output."""
        done = run(command, env=self.environment())
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def show(self, kind, name):
        """What scontrol says of a node or of one array task, "7_0"; empty when it knows none."""
        said = self.command("scontrol", "--oneliner", "show", kind, name, check=False)
        return dict(word.split("=", 1) for word in said.split() if "=" in word)

    def logs(self):
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}"
            for path in (self.folder / "log").iterdir()
        )

    def cancel_all(self):
        """Ends all jobs, and makes sure that both nodes are there, for the next test."""
        self.command(
            "scancel", "--full", *self.command("squeue", "-h", "-o", "%i").split(), check=False
        )
        for node in NODES:
            if not processes(
                lambda argv, _, node=node: argv[0].endswith("slurmd") and argv[-1:] == [node]
            ):
                self.start_node(node)
                self.command("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
        until(
            lambda: not self.command("squeue", "-h"),
            240,
            lambda: self.command("squeue") + self.logs(),
        )
        until(lambda: all(self.node_state(node) == "IDLE" for node in NODES), 240, self.logs)


def processes(chosen):
    """Processes by their command line and environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                argv, environ = (
                    (entry / name).read_bytes().decode().split("\0")[:-1]
                    for name in ("cmdline", "environ")
                )
            except (OSError, ValueError):
                continue
            if argv and chosen(argv, dict(pair.partition("=")[::2] for pair in environ)):
                found.append(int(entry.name))
    return found


class Watched:
    """A process that is no child of ours, by a handle that no other process can get."""

    def __init__(self, pid):
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def is_alive(self):
        return not select.select([self._handle], [], [], 0)[0]

    def wait(self, seconds):
        assert select.select([self._handle], [], [], seconds)[0], (
            f"process {self.pid} is still there after {seconds} s"
        )
        os.close(self._handle)

    def send(self, number):
        signal.pidfd_send_signal(self._handle, number)
