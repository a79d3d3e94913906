"""One training job in which one rank fails, started as jobs are started, for test_faults.py: with and without ddpfix.

Everything is forked from a server that has imported torch, so that the whole table takes a minute and not an hour.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

#: Of the process groups, in seconds: what the ranks of a job without ddpfix wait for a rank that does not come.
GROUP_TIMEOUT = 3.0

PEER, FAULTY = 0, 1

OutOfMemoryError = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)


class Grumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")


class Model(torch.nn.Linear):
    raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raises:
            raise ValueError("boom")
        return super().forward(x)


class Samples(Dataset[torch.Tensor]):
    def __init__(self, count: int, strike: int, before: Callable[[], None]) -> None:
        self.data = torch.randn(count, 4)
        self.strike, self.before = strike, before

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == self.strike:
            self.before()
            raise ValueError("boom")
        return self.data[i]


def _raise(error: BaseException) -> None:
    raise error


#: What the faulty rank does in the body of its loop.
IN_THE_BODY: dict[str, Callable[[], Any]] = {
    "between": lambda: _raise(ValueError("boom")),
    "out of memory": lambda: _raise(OutOfMemoryError("boom")),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "sys.exit": lambda: sys.exit(3),
    "SystemExit": lambda: _raise(SystemExit(3)),
    "os._exit": lambda: os._exit(5),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
}
FAULTS = ("forward", "backward", "loader", "worker", *IN_THE_BODY)
#: The exception is caught, and the script goes on with the next batch.
SWALLOWED = ("swallowed before the forward", "swallowed after the forward")


@dataclasses.dataclass(frozen=True)
class Moment:
    """Where the peer is when the fault strikes.

    Arguments:
        counts: batches of the peer and of the faulty rank in each epoch.
        strike: the batch of the faulty rank at which it happens, in the first epoch.
        tells: the peer tells when it has come there, and the fault waits for that.
        from_list: loops run over lists, whose end nobody sees.
        epochs: of the peer.
    """

    counts: tuple[int, int] = (5, 5)
    strike: int = 2
    tells: bool = True
    from_list: bool = False
    epochs: int = 2


MOMENTS = {
    "all train": Moment(tells=False),
    "the peer shadows": Moment((3, 5), 4, tells=False),
    "the peer is at its loop end": Moment((3, 5), 3),
    "the peer is in a barrier": Moment(),
    "the peer is at its exit": Moment((3, 5), 3, from_list=True, epochs=1),
    "the peer destroys its group": Moment((3, 5), 3, from_list=True, epochs=1),
}


def train(rank: int, fault: str, moment_name: str, folder: str) -> None:
    """The job."""
    moment, me = MOMENTS[moment_name], rank == FAULTY
    there = os.path.join(folder, "peer is there")

    def tell() -> None:
        with open(there, "w"):
            pass

    def before() -> None:
        while moment.tells and not os.path.exists(there):
            time.sleep(0.001)
        with open(os.path.join(folder, "struck"), "w") as file:
            file.write(str(time.monotonic()))

    torch.manual_seed(rank)
    module = Model(4, 2)
    model = DDP(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    in_loader = me and fault in ("loader", "worker")
    samples = Samples(moment.counts[rank], moment.strike if in_loader else -1, before)
    loader: Any = DataLoader(samples, batch_size=1, num_workers=int(fault == "worker"))

    def step(x: torch.Tensor, strike: bool) -> None:
        if strike and fault == SWALLOWED[0]:
            raise ValueError("boom")
        optimizer.zero_grad()
        module.raises = strike and fault == "forward"
        output = model(x)
        if strike and fault == SWALLOWED[1]:
            raise ValueError("boom")
        if strike and fault == "backward":
            output = Grumpy.apply(output)
        output.square().sum().backward()
        optimizer.step()

    def one_epoch(batches: Any, epoch: int) -> None:
        for i, x in enumerate(batches):
            strike = me and epoch == 0 and i == moment.strike and not in_loader
            if not me and epoch == 0 and i == 2 and moment_name == "the peer is in a barrier":
                tell()
                dist.barrier()
            if strike:
                before()
                if fault in IN_THE_BODY:
                    IN_THE_BODY[fault]()
            try:
                step(x, strike)
            except ValueError:
                if fault not in SWALLOWED:
                    raise
            if not me and epoch == 0 and i == moment.counts[PEER] - 1 and moment_name == "the peer is at its loop end":
                tell()

    for epoch in range(moment.epochs):
        one_epoch(_listed(loader) if moment.from_list else loader, epoch)
    if moment_name in ("the peer is at its exit", "the peer destroys its group") and not me:
        tell()
        if moment_name == "the peer destroys its group":
            dist.destroy_process_group()
    with open(os.path.join(folder, f"digest{rank}"), "w") as file:
        file.write(str(sum(p.double().sum().item() for p in model.parameters())))


def _listed(loader: Any) -> Iterator[torch.Tensor]:
    """Batches from an iterator of the script's own."""
    iterator = iter(loader)
    while True:
        try:
            x = next(iterator)
        except StopIteration:
            return
        yield x


_kept: list[Any] = []


def rank_main(rank: int, fault: str, moment: str, folder: str) -> None:
    """What a rank runs, under each launcher."""
    output = os.open(os.path.join(folder, f"output{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A fork leaves torch without its thread pool; see ranks.py.
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method="file://" + os.path.join(folder, "store"),
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT),
    )
    _kept.append(dist.group.WORLD)  # see the end of ranks.py
    train(rank, fault, moment, folder)


# -- launchers ---------------------------------------------------------------------


def _fork(fault: str, moment: str, folder: str) -> dict[str, Any]:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=rank_main, args=(rank, fault, moment, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    ended: dict[int, float] = {}
    while len(ended) < 2:
        waiting = [rank for rank in range(2) if rank not in ended]
        for sentinel in multiprocessing.connection.wait([processes[rank].sentinel for rank in waiting]):
            rank = next(rank for rank in waiting if processes[rank].sentinel == sentinel)
            processes[rank].join()
            ended[rank] = time.monotonic()
    return {"codes": [process.exitcode for process in processes], "ended": ended[PEER]}


def _spawn(fault: str, moment: str, folder: str) -> dict[str, Any]:
    """torch.multiprocessing.spawn, but for the import of torch in each process."""
    import torch.multiprocessing as mp

    try:
        mp.start_processes(rank_main, (fault, moment, folder), nprocs=2, start_method="fork")
    except mp.ProcessRaisedException as error:
        text = str(error)
        report: list[Any] = ["raised", error.error_index, text.strip().splitlines()[-1]]
    except mp.ProcessExitedException as error:
        text = str(error)
        report = ["exited", error.error_index, error.exit_code, error.signal_name]
    else:
        return {"report": ["fine"], "text": "", "ended": time.monotonic()}
    return {"report": report, "text": text, "ended": time.monotonic()}


def _elastic_main(fault: str, moment: str, folder: str) -> None:
    rank = int(os.environ["RANK"])
    os.symlink(os.environ["TORCHELASTIC_ERROR_FILE"], os.path.join(folder, f"recorded{rank}"))
    rank_main(rank, fault, moment, folder)


def _torchrun(fault: str, moment: str, folder: str) -> dict[str, Any]:
    """The agent of torchrun, which records errors as ``torch.distributed.elastic``'s ``record`` does."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        monitor_interval=0.05,
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.path.join(folder, "logs")),
    )
    try:
        elastic_launch(config, _elastic_main)(fault, moment, folder)
    except ChildFailedError as error:
        # The rank that it names is the first that it finds dead, with ddpfix as without: the faulty one or its peer.
        report: list[Any] = ["failed", sorted(error.failures)]
    else:
        report = ["fine"]
    text = _read(os.path.join(folder, f"recorded{FAULTY}"))
    recorded = json.loads(text)["message"] if text else None
    return {"report": report, "ended": time.monotonic(), "recorded": recorded and recorded["message"].splitlines()[-1]}


LAUNCHERS: dict[str, Callable[[str, str, str], dict[str, Any]]] = {"fork": _fork, "spawn": _spawn, "torchrun": _torchrun}


def job(rank: int, world_size: int, mode: str, launcher: str, fault: str, moment: str) -> dict[str, Any]:
    """Runs one job and tells what became of it; a case of ranks.py that makes ranks of its own."""
    os.setsid()
    with tempfile.TemporaryDirectory() as folder:
        watched = _watch(folder)
        found = LAUNCHERS[launcher](fault, moment, folder)
        watched()
        read = {name: _read(os.path.join(folder, name)) for name in ("struck", "output0", "output1", "digest0", "digest1")}
        found.update(
            seconds=found.pop("ended") - float(read["struck"] or "nan"),
            output=[read["output0"], read["output1"]],
            digests=[read["digest0"], read["digest1"]],
            orphans=_orphans(),
        )
        return found


def _watch(folder: str) -> Callable[[], None]:
    """Kills all processes of this session that outlive the limit, and has them say where they sit."""
    session, limit = os.getpid(), 8 * GROUP_TIMEOUT
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        import select

        if not select.select([reader], [], [], limit)[0]:
            for each in (signal.SIGUSR1, signal.SIGKILL):
                for other in _of_session(session) - {session, os.getpid()}:
                    with contextlib.suppress(OSError):
                        os.kill(other, each)
                time.sleep(0.5)
        os._exit(0)
    os.close(reader)

    def stop() -> None:
        os.close(writer)
        os.waitpid(pid, 0)

    return stop


def _read(path: str) -> str:
    if not os.path.exists(path):
        return ""
    with open(path, errors="replace") as file:
        return file.read()


def _of_session(session: int) -> set[int]:
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = _read(f"/proc/{name}/stat").rpartition(")")[2].split()
            if fields and fields[0] not in "ZX" and int(fields[3]) == session:
                found.add(int(name))
    return found


def _orphans() -> list[int]:
    """What is left of this session. A DataLoader worker looks every 5 seconds (torch.utils.data._utils) whether its rank is there."""
    mine = {os.getpid()}
    deadline = time.monotonic() + 15
    while _of_session(os.getpid()) - mine and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted(_of_session(os.getpid()) - mine)
