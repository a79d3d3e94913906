"""Runs a function on several ranks, each in a process of its own.

A server process imports torch once and forks one child for each case, which forks one for each rank: a case costs tens of milliseconds
instead of an import of torch, starts from a clean interpreter state, may really exit (``end="exit"``), and may be killed without harm to the
next one. Cases that only wait for a timeout may be run side by side, from threads.

A case is a function ``fn(rank, world_size, mode, *args)`` named as ``"module:function"``, with the module in ``tests/``. It runs inside an
initialised gloo group and returns something that can be pickled, or a function of no arguments which is called once the group has been
destroyed (so the picture is taken after everything that happens at that moment).
"""

from __future__ import annotations

import atexit
import dataclasses
import faulthandler
import importlib
import logging
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Client, Connection
from typing import Any, Callable

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)

STOCK, JOIN, DDPFIX = "stock", "join", "ddpfix"

#: How long a collective of a case may wait. Where a hang is expected it is short; elsewhere it is longer than the hard limit,
#: so that a hang is cut by the server, which then knows where each rank sat.
HANG_TIMEOUT = 1.5
TIMEOUT = 120.0
HARD_LIMIT = float(os.environ.get("DDPFIX_TESTS_HARD_LIMIT", "40"))


@dataclasses.dataclass
class Rank:
    """What became of one rank: ``value`` if it finished, ``error`` (a traceback) if it raised, ``stack`` if it had to be killed."""

    finished: bool = False
    value: Any = None
    error: str | None = None
    exit_code: int | None = None
    stack: str = ""
    output: str = ""

    def line(self) -> str:
        if self.finished:
            return "finished"
        if self.error is not None:
            return self.error.strip().splitlines()[-1][:200]
        if self.stack:
            return "stuck"
        return f"died with exit code {self.exit_code}"


@dataclasses.dataclass
class Outcome:
    """What became of a case."""

    ranks: list[Rank]
    seconds: float = 0.0
    hard_limit_hit: bool = False

    @property
    def finished(self) -> bool:
        return all(rank.finished for rank in self.ranks)

    @property
    def values(self) -> list[Any]:
        if not self.finished:
            raise AssertionError(self.report())
        return [rank.value for rank in self.ranks]

    @property
    def skipped(self) -> str | None:
        """The name of a module that the case needs and this environment lacks."""
        for rank in self.ranks:
            if rank.error is not None and "ModuleNotFoundError" in rank.line() and "ddpfix" not in rank.line():
                return rank.line()
        return None

    def report(self) -> str:
        lines = ["the ranks did not all finish" + (" (killed at the hard limit)" if self.hard_limit_hit else "")]
        for number, rank in enumerate(self.ranks):
            lines.append(f"---- rank {number}: {rank.line()}")
            lines.append((rank.error or "") + rank.stack)
            if rank.output.strip():
                lines.append("output: " + rank.output.strip()[-2000:])
        return "\n".join(lines)


@dataclasses.dataclass
class _Case:
    function: str
    world_size: int
    mode: str
    args: tuple[Any, ...]
    timeout: float
    hard_limit: float
    end: str
    prepare: str | None
    environment: dict[str, str]
    group: bool


class Ranks:
    """The test's side: hands cases to servers, which are started when first needed. May be used from several threads.

    Arguments:
        imports: a statement that imports what the cases need, besides torch.
    """

    def __init__(self, imports: str = "") -> None:
        # ddpfix is imported before torch, as a script does; a server for the other modes never imports it.
        self._servers = {True: _Server(f"import ddpfix\n{imports}"), False: _Server(imports)}

    def run(
        self,
        function: str | Callable[..., Any],
        world_size: int,
        mode: str,
        *args: Any,
        timeout: float | None = None,
        hard_limit: float = HARD_LIMIT,
        end: str = "destroy",
        prepare: str | None = None,
        environment: dict[str, str] | None = None,
        group: bool = True,
    ) -> Outcome:
        """Runs one case.

        Arguments:
            function: the case, itself or as ``"module:function"``.
            world_size: number of ranks.
            mode: ``"stock"``, ``"join"`` (also stock; the case enters its own ``join()``) or ``"ddpfix"``.
            args: further arguments of the case, after rank, world size and mode.
            timeout: of the process group, in seconds.
            hard_limit: seconds after which ranks are killed, and tell where they sat.
            end: ``"destroy"``: ``destroy_process_group()`` after the case, with ddpfix still on; ``"exit"``: nothing, the interpreter
                exits, and the picture is taken by the last exit handler; ``"process"``: the same, but the picture is taken before, and
                the process really ends, in its own time and with its own exit code.
            prepare: ``"module:function"`` called after ddpfix has been switched on, before the group is made.
            environment: environment variables for ddpfix, which the ranks then import themselves, after torch.
            group: make a process group first.
        """
        if not isinstance(function, str):
            function = f"{function.__module__}:{function.__qualname__}"
        limit = TIMEOUT if timeout is None else timeout
        case = _Case(function, world_size, mode, args, limit, hard_limit, end, prepare, environment or {}, group)
        with self._servers[mode == DDPFIX and not environment].connect() as connection:
            connection.send_bytes(pickle.dumps(case))
            outcome = pickle.loads(connection.recv_bytes())
            assert isinstance(outcome, Outcome)
            return outcome

    def close(self) -> None:
        for server in self._servers.values():
            server.close()


class _Server:
    def __init__(self, first: str) -> None:
        self._first = first
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""
        self._alive = -1

    def connect(self) -> Connection:
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self.close()
            if self._process is None:
                self._start()
            return Client(os.path.join(self._folder, "server"), "AF_UNIX")

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        # An open pipe tells the server that we are still there, however we end.
        reader, self._alive = os.pipe()
        environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
        for name in [name for name in environment if name.startswith(("DDPFIX", "PYTEST"))]:
            del environment[name]
        path = f"import sys; sys.path[:0] = [{HERE!r}, {os.path.join(HERE, 'benchmarks')!r}]; sys.path.append({ROOT!r})"
        code = f"{path}\n{self._first}\nimport ranks; ranks._serve({self._folder!r}, {reader})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[reader], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=HERE
        )
        os.close(reader)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise RuntimeError("the server of the ranks did not start")

    def close(self) -> None:
        if self._process is None:
            return
        os.close(self._alive)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process = None
        shutil.rmtree(self._folder, ignore_errors=True)


def _serve(folder: str, alive: int) -> None:
    import torch
    import torch._dynamo  # the first forward of a DDP model would import it in every child
    import torch.distributed.optim  # likewise the first hook

    torch.set_num_threads(1)
    for name in ("loops", "programs"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.join(folder, "server"))
        listener.listen(64)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listener, alive], [], [])
            if alive in ready:
                return
            accepted, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                os.close(alive)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                connection = Connection(accepted.detach())
                connection.send_bytes(pickle.dumps(_run_case(pickle.loads(connection.recv_bytes()))))
                os._exit(0)
            accepted.close()


def _run_case(case: _Case) -> Outcome:
    folder = tempfile.mkdtemp(prefix="ranks-")
    server = os.getpid()
    outcome = Outcome([Rank() for _ in range(case.world_size)])
    start = time.monotonic()
    children: dict[int, int] = {}  # the end of a pipe -> rank
    pids = []
    received = [bytearray() for _ in range(case.world_size)]
    try:
        for rank in range(case.world_size):
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                for other in children:
                    os.close(other)
                os.close(reader)
                _child(case, rank, writer, folder)  # does not return, except through SystemExit
            os.close(writer)
            children[reader] = rank
            pids.append(pid)
        deadline = start + case.hard_limit
        while children:
            ready, _, _ = select.select(list(children), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                outcome.hard_limit_hit = True
                break
            for reader in ready:
                data = os.read(reader, 1 << 20)
                if data:
                    received[children[reader]] += data
                else:
                    del children[reader]
                    os.close(reader)
        if outcome.hard_limit_hit:
            for rank in children.values():
                os.kill(pids[rank], signal.SIGUSR1)
            _wait_for_dumps([os.path.join(folder, f"stack{rank}") for rank in children.values()])
            for rank in children.values():
                with open(os.path.join(folder, f"stack{rank}")) as file:
                    outcome.ranks[rank].stack = file.read() or "(no stack)"
        for rank, pid in enumerate(pids):
            # A rank that has closed its pipe may still hang in the exit of its interpreter.
            status = _reap(pid, 0.0 if outcome.hard_limit_hit else deadline - time.monotonic())
            outcome.ranks[rank].exit_code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
            if received[rank]:
                answer = pickle.loads(bytes(received[rank]))
                outcome.ranks[rank].finished = answer["error"] is None
                outcome.ranks[rank].value = answer["value"]
                outcome.ranks[rank].error = answer["error"]
            path = os.path.join(folder, f"output{rank}")
            if os.path.exists(path):
                with open(path, errors="replace") as file:
                    outcome.ranks[rank].output = file.read()[-20000:]
    finally:
        # A child on its way to the exit of its interpreter passes here as well.
        if os.getpid() == server:
            for reader in children:
                os.close(reader)
            shutil.rmtree(folder, ignore_errors=True)
    outcome.seconds = time.monotonic() - start
    return outcome


def _wait_for_dumps(paths: list[str]) -> None:
    """Waits until the stacks have been written: each file has content and has stopped growing."""
    deadline = time.monotonic() + 5
    sizes: list[int] = []
    while time.monotonic() < deadline:
        now = [os.path.getsize(path) if os.path.exists(path) else 0 for path in paths]
        if all(now) and now == sizes:
            return
        sizes = now
        time.sleep(0.1)


def _reap(pid: int, patience: float) -> int:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def logged() -> list[str]:
    """What ddpfix says from now on in this process, by level: ``"WARNING: ddpfix: ..."``."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname}: {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("ddpfix").addHandler(handler)
    logging.getLogger("ddpfix").setLevel(logging.INFO)
    return lines


def find(function: str) -> Callable[..., Any]:
    module, _, name = function.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _child(case: _Case, rank: int, writer: int, folder: str) -> None:
    output = os.open(os.path.join(folder, f"output{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    stack = open(os.path.join(folder, f"stack{rank}"), "w")  # noqa: SIM115 (lives as long as the process)
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)

    def send(value: Any, error: str | None) -> None:
        data = pickle.dumps({"value": value, "error": error})
        while data:
            data = data[os.write(writer, data) :]

    try:
        value = _run_rank(case, rank, folder, send)
    except BaseException as error:  # noqa: BLE001 (a rank that fails in any way says so)
        send(None, traceback.format_exc())
        if case.end == "process" and isinstance(error, SystemExit):
            raise
        sys.stdout.flush()
        # Without destroy_process_group: a script that has raised does not come to it either.
        os._exit(1)
    if case.end == "exit":
        sys.exit(0)
    send(value, None)
    if case.end == "process":
        sys.stdout.flush()
        sys.exit(0)
    sys.stdout.flush()
    os._exit(0)


_kept: list[Any] = []


def _run_rank(case: _Case, rank: int, folder: str, send: Callable[[Any, str | None], None]) -> Any:
    import datetime

    import torch
    import torch.distributed as dist

    os.environ.update(case.environment)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(case.world_size), LOCAL_WORLD_SIZE=str(case.world_size))
    results: list[Any] = []
    if case.end == "exit":
        # The first one registered is the last one called.
        def last_exit_handler() -> None:
            try:
                send(_picture(results[0]), None)
            except BaseException:  # noqa: BLE001
                send(None, traceback.format_exc())
            # What follows is the end of the interpreter itself, which takes long with torch and concerns nobody.
            os._exit(0)

        atexit.register(last_exit_handler)
    torch.manual_seed(0)
    # A fork leaves torch a dead thread pool, which the first one to ask replaces; several threads that ask at once (those of autograd) may
    # find none ("Invalid thread pool!", torch 2.13, ParallelOpenMP.cpp). So it is asked for here, where there is one thread.
    torch.set_num_threads(1)
    if case.mode == DDPFIX:
        import ddpfix

        ddpfix.patch()
    if case.prepare is not None:
        find(case.prepare)()
    if case.group:
        dist.init_process_group(
            "gloo",
            init_method="file://" + os.path.join(folder, "store"),
            rank=rank,
            world_size=case.world_size,
            timeout=datetime.timedelta(seconds=case.timeout),
        )
    result = find(case.function)(rank, case.world_size, case.mode, *case.args)
    # Kept until the process ends: the last reference to a process group must not be dropped here. Its destructor waits for gloo's threads with
    # the GIL held, and one of them may want the GIL to free a Python object (torch 2.13).
    results.append(result)
    _kept.append((results, dist.group.WORLD if case.group else None))
    if case.end == "exit":
        return None
    if dist.is_initialized() and case.end != "process":
        dist.destroy_process_group()
    return _picture(result)


def _picture(result: Any) -> Any:
    return result() if callable(result) else result
