"""Python processes that begin with vLLM imported.

A server is three processes, each of which imports vLLM and PyTorch for eleven seconds: four fifths of what starting it
costs. Processes made here are forks of one that has imported them and has done nothing else: it has one thread, no
engine and no event loop. (Python's own ``multiprocessing.forkserver`` hands on no environment, and makes processes its
own children, which tests of crashes would notice.) So:

- ``Popen`` is ``subprocess.Popen`` for ``[sys.executable, *words]``. The process is a child of this one, with the
  environment, working directory, descriptors and ``preexec_fn`` that it is given.
- The start method ``spawn``, which vLLM's CPU platform demands, forks as well in such a process.
- Whoever starts a process asks a *source*: a fork that has done nothing since the imports, that it alone has and that
  ends with it. The source forks twice and the process between ends, whereupon the system gives the orphan to the
  nearest ancestor that adopts them: the one that asks.
- What is read from the environment while modules are imported was read once. Where a process would have read other
  values, ``Popen`` refuses, and ``spawn`` starts it from scratch.

pytest-xdist's workers are such processes too. Tests of how processes start use ``subprocess``; so does the fixture
``server``, which most tests of ``tests/server`` share.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import itertools
import os
import pickle
import runpy
import socket
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

import setproctitle

from tests.processes import end_with_tests

MODULES = (
    # Before the CPU's worker, which replaces a function of vLLM's by its own: tests of the backend need vLLM's.
    "vllm_kvmerge.engine.attention.cuda",
    "vllm.entrypoints.cli.serve",
    "vllm.v1.worker.cpu_worker",
    "vllm_kvmerge.server.endpoint",
    "vllm_kvmerge.engine.worker.cpu_worker",
)
"""What servers, engines and workers import; what these import in turn included."""

OWN = {"OPENBLAS_NUM_THREADS": "1", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1"}
"""The first source's variables. OpenBLAS has threads without the one; vLLM gives the other to engines and workers."""

INDIFFERENT = {
    "PROMETHEUS_MULTIPROC_DIR",  # see _first_value
    "prometheus_multiproc_dir",
    "VLLM_PLUGINS",  # selects among packages with a platform: there are none
    "VLLM_CPU_OMP_THREADS_BIND",  # read with all that are set, where modules copy the environment
    *OWN,
}
"""Variables that may have been read with another value."""

NATIVE = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}
"""Variables that libraries read when they are loaded, beside those that bind threads to cores."""

IDLE = 0.01
"""Seconds for which vLLM's workers, and engines that wait for them, ask for news without rest before they sleep. It is
one second otherwise, for which they take a core from whoever else is tested."""

PR_SET_CHILD_SUBREAPER = 36
MAX_BYTES = 1 << 17
"""Of a request for a process: its words and its environment."""

initial: dict[str, str] = {}
"""The environment before tests: engines in their process change it."""

_libc = ctypes.CDLL(None)
_source: socket.socket | None = None
_lock = threading.Lock()
_read: dict[str, set[str | None]] = {}
"""For each variable that was read by imports, the values before and after them."""


class Popen(subprocess.Popen):
    """``subprocess.Popen`` of ``[sys.executable, *words]``, forked.

    Raises:
        ValueError: with its environment, imports would have read something else.
        RuntimeError: the source has ended.
    """

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more: Any) -> None:
        environment = dict(os.environ if env is None else env)
        if other := _read_otherwise(environment):
            raise ValueError(f"{other} were read when vLLM was imported, with other values: start it from scratch")
        pipes = more[3:9]  # (read, write) ends of stdin, stdout and stderr; -1: as in this process
        standard = (given if given != -1 else fd for fd, given in enumerate((pipes[0], pipes[3], pipes[5])))
        descriptors = dict(enumerate(standard)) | {fd: fd for fd in pass_fds}
        self.pid = _start(args[1:], descriptors, environment, str(cwd or Path.cwd()), preexec_fn)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def run(
    words: Sequence[str],
    input: str | None = None,
    env: Mapping[str, str] | None = None,
    from_scratch: bool = False,
    timeout: float = 500,
) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` of ``[sys.executable, *words]`` with text for stdin and the output captured."""
    with (subprocess.Popen if from_scratch else Popen)(
        words,
        stdin=subprocess.DEVNULL if input is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        preexec_fn=end_with_tests,
    ) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def _read_otherwise(environment: Mapping[str, str]) -> list[str]:
    """Variables that imports have read with other values."""
    with _lock:
        if _source is None:
            _start_first_source()
    return [name for name, values in _read.items() if environment.get(name) not in values]


def _start_first_source() -> None:
    global _source
    _source, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _source.settimeout(120)
    subprocess.Popen(
        [sys.executable, "-c", f"from tests import preloaded; preloaded._main({theirs.fileno()})"],
        env={name: value for name, value in (initial or os.environ).items() if name not in INDIFFERENT} | OWN,
        cwd=Path(__file__).parents[1],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        preexec_fn=end_with_tests,
    )
    theirs.close()
    _read.update(pickle.loads(_answer()))


def _start(words: Sequence[str], descriptors: dict[int, int], environment: dict, cwd: str, first: Any = None) -> int:
    """Starts ``python *words`` as a child of this process; its id.

    descriptors: this process's, by their number in the new one. first: called there before anything else, and before
    its own source is made, which is where it says, for instance in its file system.
    """
    request = pickle.dumps((list(map(str, words)), list(descriptors), environment, cwd, first))
    with _lock:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            return int(_answer(request, list(descriptors.values())))
        finally:
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 0)


def _answer(request: bytes = b"", descriptors: Sequence[int] = ()) -> bytes:
    assert _source is not None
    answer = b""
    with contextlib.suppress(ConnectionError):
        if request:
            socket.send_fds(_source, [request], descriptors)
        answer = _source.recv(MAX_BYTES)
    if not answer:
        raise RuntimeError("the process that has imported vLLM for the tests has ended")
    return answer


def _main(descriptor: int) -> None:
    """The first source, and in its forks the processes that are asked for: imports, waits, and does what one asks."""
    setproctitle.getproctitle()  # finds where the title is by the environment, which is still next to it
    before = dict(os.environ)
    names = _import() - INDIFFERENT - {"PYTHONPATH"}  # see _enter
    after = dict(os.environ)
    _read.update({name: {before.get(name), after.get(name)} for name in names})
    assert len(os.listdir("/proc/self/task")) == 1, "a process of several threads must not be forked"
    gc.freeze()
    source = socket.socket(fileno=descriptor)
    source.send(pickle.dumps(_read))
    while True:
        (words, numbers, environment, cwd, first), received = _next(source)
        if first:
            first()
        own, source = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork():
            break
        # The new process's own source.
        own.close()
        _close(received)
    source.close()
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name) and environment.get(name) == before.get(name):
            environment[name] = after[name]  # as imports would have done
    _enter(own, dict(zip(numbers, received, strict=True)), environment, cwd)
    _leave(_run(words))


def _import() -> set[str]:
    """Imports; the names of the variables that are read meanwhile."""
    names = set(NATIVE)

    class Watched(os._Environ):
        def __getitem__(self, name):
            names.add(name)
            return super().__getitem__(name)

    os.environ.__class__ = Watched
    for module in MODULES:
        __import__(module)
    os.environ.__class__ = os._Environ
    from prometheus_client import values
    from vllm.distributed.device_communicators import shm_broadcast

    values.ValueClass = _first_value
    shm_broadcast.SpinCondition = functools.partial(shm_broadcast.SpinCondition, busy_loop_s=IDLE)
    return {name for name in names if isinstance(name, str)}


def _first_value(*args: Any, **options: Any) -> Any:
    """Stands for ``prometheus_client.values.ValueClass``, which is chosen by the environment as that is imported, until
    a process makes its first value."""
    from prometheus_client import values

    values.ValueClass = values.get_value_class()
    return values.ValueClass(*args, **options)


def _next(source: socket.socket) -> tuple[Any, list[int]]:
    """Waits for requests; returns in a fork for each: the request, and the descriptors that came with it."""
    while True:
        message, received, *_ = socket.recv_fds(source, MAX_BYTES, 250)
        if not message:
            os._exit(0)  # the process that asks has ended
        reader, writer = os.pipe()
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            os.close(writer)
            os.read(reader, 1)  # it has been adopted when nobody can write
            os.close(reader)
            source.send(str(os.getpid()).encode())
            source.close()
            return pickle.loads(message), received
        os.waitpid(between, 0)
        _close([reader, writer, *received])


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _enter(source: socket.socket, descriptors: dict[int, int], environment: dict[str, str], cwd: str) -> None:
    """Gives this process its descriptors, environment and working directory, and the source that it asks."""
    global _source
    free = max(descriptors) + 1
    _source = socket.socket(fileno=fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, free))
    _source.settimeout(120)
    kept = {fd: fcntl.fcntl(received, fcntl.F_DUPFD_CLOEXEC, free) for fd, received in descriptors.items()}
    source.close()
    _close(descriptors.values())
    for fd, received in kept.items():
        os.dup2(received, fd)
    _close(kept.values())
    # Behind the folder of what is run, where Python puts it.
    sys.path[1 : 1 + len(_entries(os.environ))] = _entries(environment)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    os.chdir(cwd)
    from_scratch = util.spawnv_passfds

    def spawn(path: bytes, args: Sequence[str], passed: Iterable[int]) -> int:
        if "--multiprocessing-fork" not in args or _read_otherwise(os.environ):
            return from_scratch(path, args, passed)
        return _start(args[args.index("-c") :], {fd: fd for fd in (0, 1, 2, *passed)}, dict(os.environ), os.getcwd())

    util.spawnv_passfds = spawn


def _entries(environment: Mapping[str, str]) -> list[str]:
    """What Python puts on its path for ``PYTHONPATH``."""
    entries = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    return list(dict.fromkeys(map(os.path.abspath, entries)))


def _run(words: Sequence[str]) -> Any:
    """Does what ``python *words`` does; what it exits with."""
    kind, *more = itertools.dropwhile(lambda word: word in ("-B", "-u"), words)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if kind == "-c":
            sys.argv, sys.path[0] = ["-c", *more[1:]], ""
            exec(compile(more[0], "<string>", "exec"), main.__dict__)
        elif kind == "-m":
            sys.argv, sys.path[0] = more, os.getcwd()
            runpy.run_module(more[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = [kind, *more], str(Path(kind).parent)
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        return end.code
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _leave(status: Any) -> None:
    """Ends this process as Python does, but takes no modules apart, which is half a second's work."""
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)
