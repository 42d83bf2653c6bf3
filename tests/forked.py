"""Python processes that tests start, forked from one that has imported the package: most of their
time is imports.

``install`` puts ``Popen`` in the place of subprocess's. It serves what a module of the tests starts
as ``python -m datatrove_ckpt``, or as a script or code that names datatrove. All else is a new
process: what the code under test starts, what the marker ``real_process`` asks for, and where the
difference could be seen (``_fork`` and its helpers).

The server has one thread. It forks when asked and reaps when asked, so that a process that has
ended stays a zombie until its Popen looks, as a child does. Not as in a new process: the parent,
/proc/PID/cmdline, what is imported, and the seed of ``hash``; at the end, only the objects of the
program itself are deleted.
"""

import atexit
import functools
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path

from loguru._better_exceptions import ExceptionFormatter

# 4 ms for each log, of which each test has one.
ExceptionFormatter._get_lib_dirs = staticmethod(functools.cache(ExceptionFormatter._get_lib_dirs))
_NEW = subprocess.Popen
_ARGUMENTS = _NEW._execute_child.__code__.co_varnames[2:]  # type: ignore[attr-defined]
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_STREAMS = ("p2cread", "c2pwrite", "errwrite")
_NOT_SERVED = ("executable", "preexec_fn", "pass_fds", "shell", "gid", "gids", "uid")
# Read by the interpreter and by C libraries, or found by going through all variables.
_AT_START = (
    "PYTHON",
    "LC_",
    "LANG",
    "LD_",
    "TZ",
    "MALLOC_",
    "OMP_",
    "OPENBLAS_NUM_",
    "ARROW_",
    "FSSPEC_",
    "LOGURU_",
    "TQDM_",
)
_ABOUT_IMPORTS = re.compile(r"\bsys\.(modules|meta_path|flags)\b|importlib|__import__|builtins")
_START = (
    "import sys; sys.path.insert(0, {!r}); import forked, waits; del sys.path[0]; "
    "waits.shorten(); forked.serve({})"
)
_MODULES = """
    datatrove.executor datatrove.pipeline.inference.run_inference datatrove.pipeline.readers.jsonl
    datatrove.pipeline.writers.jsonl datatrove_ckpt.cli.execution
    datatrove_ckpt.cli.main datatrove_ckpt.cli.run datatrove_ckpt.cli.status
    datatrove_ckpt.cli.output_commands datatrove_ckpt.executors.local datatrove_ckpt.generation.rank
    datatrove_ckpt.inference.servers.host datatrove_ckpt.mirror.mirror
    datatrove_ckpt.mirror.restore datatrove_ckpt.run_folder.preflight datatrove_ckpt.readers
    datatrove_ckpt.rollouts datatrove_ckpt.runner datatrove_ckpt.testing numpy.random uvloop
    zstandard
"""


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A process that the server forked, or else a new one."""

    is_allowed = True
    _server = None
    _starts = threading.Lock()
    _forked_by = None

    def _execute_child(self, args, *others):
        if not self._fork(args, dict(zip(_ARGUMENTS, others, strict=False))):
            super()._execute_child(args, *others)  # type: ignore[misc]

    def _fork(self, args, given):
        odd = (
            any(given[name] for name in _NOT_SERVED)
            or not given["close_fds"]
            or given["umask"] != -1
        )
        if odd or not self.is_allowed or not _of_the_tests():
            return False
        cwd = str(Path(os.fsdecode(given["cwd"] or "")).absolute())
        words = _served(args, cwd)
        streams = [
            given[pipe] if given[pipe] >= 0 else number for number, pipe in enumerate(_STREAMS)
        ]
        if words is None or any(os.isatty(stream) for stream in streams):
            return False
        environment = {
            os.fsdecode(k): os.fsdecode(v) for k, v in (given["env"] or os.environ).items()
        }
        with self._starts:
            if Popen._server is None or Popen._server.owner != os.getpid():
                Popen._server = _Server()
        if not Popen._server.is_like(environment):
            return False
        order = words, environment, cwd, given["start_new_session"], given.get("process_group", -1)
        try:
            self.pid = Popen._server.ask(order, streams)
        except OSError:  # too long, or a stream is closed
            return False
        self._forked_by = Popen._server
        self._child_created = True
        self._close_pipe_fds(*(given[pipe] for pipe in _PIPES))  # type: ignore[attr-defined]
        return True

    def _internal_poll(self, _deadstate=None, **defaults):
        if self._forked_by is None:
            return super()._internal_poll(_deadstate, **defaults)  # type: ignore[misc,no-any-return]
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[has-type]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid and self.returncode is None:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            except OSError:
                self.returncode = _deadstate
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode

    def _try_wait(self, wait_flags):
        if self._forked_by is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc,no-any-return]
        if not wait_flags:
            handle = os.pidfd_open(self.pid)
            try:
                select.select([handle], [], [])
            finally:
                os.close(handle)
        return self._forked_by.ask(self.pid)  # type: ignore[no-any-return]


class _Server:
    """The process that forks, as the process sees it that started it."""

    # Of the first process of the tests, before any of them.
    environment = None

    def __init__(self):
        self.owner = os.getpid()
        self._start = dict(self.environment or os.environ)
        self._inherited = _inherited()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _NEW(
                [sys.executable, "-c", _START.format(str(Path(__file__).parent), theirs.fileno())],
                cwd="/",
                env=self._start,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self._read = pickle.loads(self._socket.recv(1 << 20))
        atexit.register(self._close)

    def is_like(self, environment):
        """Whether a new process with these variables would begin as the server did."""
        changed = {name for name, _ in environment.items() ^ self._start.items()}
        return not any(name in self._read or name.startswith(_AT_START) for name in changed) and (
            _inherited() == self._inherited
        )

    def ask(self, order, descriptors=None):
        with self._lock:
            socket.send_fds(self._socket, [pickle.dumps(order)], descriptors or [])
            return pickle.loads(self._socket.recv(1 << 16))

    def _close(self):
        if self.owner == os.getpid():
            # Workers of a loader have the socket, too, and end later than this.
            self._socket.shutdown(socket.SHUT_RDWR)
            self._process.wait()


def install():
    """From now on ``subprocess.Popen`` is ours."""
    if hasattr(os, "pidfd_open"):
        _Server.environment = dict(os.environ)
        subprocess.Popen = Popen  # type: ignore[misc]


def _of_the_tests():
    frame = sys._getframe()
    while frame.f_globals["__name__"] in (__name__, "subprocess"):
        frame = frame.f_back
    return bool(frame.f_globals["__name__"].startswith("tests."))


def _served(args, cwd):
    """The words of a command line that can be forked."""
    if isinstance(args, str | bytes | os.PathLike) or not Path(cwd).is_dir():
        return None
    words = [os.fsdecode(word) for word in args]
    if words[:3] == [sys.executable, "-m", "datatrove_ckpt"]:
        return words
    if words[0] != sys.executable or len(words) < 2:
        return None
    script = Path(cwd, words[1])
    # Which shows the lines of such code in tracebacks.
    if words[1] == "-c" and sys.version_info < (3, 13):
        source = words[2]
    elif script.suffix == ".py" and script.is_file():
        source = script.read_text(errors="replace")
    else:
        return None
    return words if "datatrove" in source and not _ABOUT_IMPORTS.search(source) else None


def _inherited():
    """What a process gets from its parent beside files and variables."""
    of_thread = Path("/proc/thread-self/status").read_text().splitlines()
    lines = [
        line for line in of_thread if line.startswith(("Umask", "SigBlk", "SigIgn", "Cpus_allowed"))
    ]
    return [*lines, Path("/proc/self/limits").read_text()]


# The server --------------------------------------------------------------------------------------


def serve(descriptor):
    """Forks until the other end is closed."""
    names = _import()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # of a terminal: it is for the tests
    orders = socket.socket(fileno=descriptor)
    orders.send(pickle.dumps(names))
    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, 1 << 20, 3)
        if not message:
            os._exit(0)
        order = pickle.loads(message)
        if isinstance(order, int):
            orders.send(pickle.dumps(os.waitpid(order, os.WNOHANG)))
            continue
        pid = os.fork()
        if pid == 0:
            orders.close()
            _become(descriptors, *order)
        for received in descriptors:
            os.close(received)
        orders.send(pickle.dumps(pid))


def _import():
    """Imports what the processes need. Returns the environment variables that were asked for."""
    import gc
    from importlib import import_module

    kind, names = type(os.environ), set()
    get = kind.__getitem__

    def recorded(environ, name):
        if sys._getframe(1).f_code.co_name in ("get", "__contains__"):  # not while all are copied
            names.add(name)
        return get(environ, name)

    kind.__getitem__ = recorded  # type: ignore[method-assign]
    for module in _MODULES.split():
        import_module(module)
    kind.__getitem__ = get  # type: ignore[method-assign]
    # datatrove looks through all that is installed, once in each process.
    sys.modules["datatrove.utils._import_utils"].check_required_dependencies("", ["orjson"])
    ExceptionFormatter._get_lib_dirs()
    gc.collect()
    gc.freeze()
    return names


def _become(streams, words, environment, cwd, new_session, group):
    """Runs a program as a new interpreter would, down to its end."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(cwd)
    if new_session:
        os.setsid()
    if group >= 0:
        os.setpgid(0, group)
    os.environ.clear()
    os.environ.update(environment)
    _forget()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    code = None
    error = None
    try:
        _execute(words)
    except SystemExit as end:
        code = end.code
    except BaseException as raised:
        code, error = 1, raised
        trace = raised.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(raised), raised.with_traceback(trace), trace)
        del raised, trace
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    _finalize()
    if isinstance(error, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


def _finalize():
    """As the interpreter does it, but only for the objects of the program: it would go through all
    memory.
    """
    import gc

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    main = vars(sys.modules["__main__"])
    for name in list(main):
        if name != "__builtins__":
            main[name] = None
    gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _forget():
    """Makes anew what imports have kept of the process."""
    import multiprocessing.process
    import tempfile

    import multiprocess.process
    import numpy
    from loguru import logger

    numpy.random.seed()
    tempfile.tempdir = None
    for module in (multiprocess, multiprocessing):
        module.process.ORIGINAL_DIR = str(Path.cwd())
    logger.remove()
    logger._core.handlers_count = 0  # type: ignore[attr-defined]
    logger.add(sys.stderr)
    del sys.modules["forked"], sys.modules["waits"]


def _execute(words):
    import runpy

    main = vars(sys.modules["__main__"])  # other modules have it
    kept = {name: main[name] for name in ("__builtins__", "__loader__")}
    main.clear()
    main.update(
        kept, __name__="__main__", __doc__=None, __package__=None, __spec__=None, __annotations__={}
    )
    sys.orig_argv = words
    if words[1] == "-m":
        sys.argv, sys.path[0] = words[2:], str(Path.cwd())
        runpy._run_module_as_main(words[2])  # type: ignore[attr-defined]
        return
    sys.argv = words[1:]
    if words[1] == "-c":
        sys.argv, sys.path[0] = ["-c", *words[3:]], ""
        code = compile(words[2], "<string>", "exec", dont_inherit=True)
    else:
        path = words[1] if words[1].startswith("/") else f"{Path.cwd()}/{words[1]}"
        sys.path[0] = str(Path(path).resolve().parent)
        main.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
        code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, main)
