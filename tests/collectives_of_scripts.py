"""Training scripts that call collectives, for test_collectives.py: each is run as it stands, with and without ddpfix."""

from __future__ import annotations

import logging
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader


class Training:
    """A model, its optimizer and the loader of one rank."""

    def __init__(self, rank: int, counts: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.model = DDP(torch.nn.Linear(4, 2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.loader = DataLoader(list(torch.randn(counts[rank], 4, generator=torch.Generator().manual_seed(rank))), batch_size=1)

    def step(self, batch: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(batch).square().sum() / scale
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


Result = dict[str, Any]


def loss_each_step(rank: int, world_size: int, mode: str, counts: tuple[int, ...], metric: bool = True) -> Result:
    """The loss is summed over the ranks in each step, and the epoch's mean after the loop."""
    training, sums, own, means = Training(rank, counts), [], [], []
    for _ in range(2):
        total = torch.zeros(2)
        for batch in training.loader:
            loss = training.step(batch)
            own.append(loss.item())
            total += torch.tensor([loss.item(), 1.0])
            if metric:
                dist.all_reduce(loss)
                sums.append(loss.item())
        if metric:
            dist.all_reduce(total)
            means.append(total.tolist())
    return {"own": own, "sums": sums, "means": means, "parameters": training.parameters()}


def tokens_before_each_step(rank: int, world_size: int, mode: str, counts: tuple[int, ...]) -> Result:
    """The number of samples of all ranks scales the loss; it is counted before the step."""
    training, numbers, means = Training(rank, counts), [], []
    for _ in range(2):
        total = torch.zeros(1)
        for batch in training.loader:
            number = torch.ones(1, dtype=torch.int64)
            dist.all_reduce(number)
            numbers.append(number.item())
            total += training.step(batch, number)
        dist.all_reduce(total)
        means.append(total.item())
    return {"numbers": numbers, "means": means, "parameters": training.parameters()}


def tokens_in_a_loop_with_a_way_out(rank: int, world_size: int, mode: str, counts: tuple[int, ...]) -> Result:
    """As before, but for all that ddpfix can see, the number may be a flag that tells who has run out."""
    training = Training(rank, counts)
    for step, batch in enumerate(training.loader):
        number = torch.ones(1)
        dist.all_reduce(number)
        training.step(batch, number)
        if step == 100:
            break
    total = torch.ones(1)
    dist.all_reduce(total)
    return {"total": total.item()}


def espnet(rank: int, world_size: int, mode: str, counts: tuple[int, ...]) -> Result:
    """The first rank that runs out of batches stops all: two places, one in the loop and one behind it."""
    training, flags = Training(rank, counts), []
    for _ in range(2):
        flag = torch.zeros(1)
        for batch in training.loader:
            dist.all_reduce(flag)
            flags.append(flag.item())
            if flag > 0:
                break
            training.step(batch)
        else:
            flag.fill_(1)
            dist.all_reduce(flag)
            flags.append(flag.item())
    return {"flags": flags, "parameters": training.parameters()}


def stops_when_all_have(rank: int, world_size: int, mode: str, counts: tuple[int, ...]) -> Result:
    """Ranks without batches go on with the last one until all are through (AllenNLP's and Composer's way)."""
    training, steps, flags = Training(rank, counts), 0, []
    iterator = iter(training.loader)
    batch = None
    while True:
        following = next(iterator, None)
        done = torch.tensor(int(following is None))
        dist.all_reduce(done)
        flags.append(done.item())
        if done == world_size:
            break
        batch = following if following is not None else batch
        training.step(batch)
        steps += 1
    return {"flags": flags, "steps": steps, "parameters": training.parameters()}


def average(value: torch.Tensor) -> torch.Tensor:
    """Called from within the loop and from behind it."""
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def one_function_for_all(rank: int, world_size: int, mode: str, counts: tuple[int, ...]) -> Result:
    training, averages, means = Training(rank, counts), [], []
    for _ in range(2):
        total = torch.zeros(())
        for batch in training.loader:
            loss = training.step(batch)
            total += 1
            averages.append(average(loss).item())
        means.append(average(total).item())
    return {"averages": averages, "means": means, "parameters": training.parameters()}


def loop_over_a_list(rank: int, world_size: int, mode: str, counts: tuple[int, ...]) -> Result:
    """The same where the end of the loop cannot be seen."""
    training, averages, means = Training(rank, counts), [], []
    batches = list(training.loader)
    for _ in range(2):
        total = torch.zeros(())
        for batch in batches:
            loss = training.step(batch)
            total += 1
            averages.append(average(loss).item())
        means.append(average(total).item())
    return {"averages": averages, "means": means, "parameters": training.parameters()}


def look_ahead(rank: int, world_size: int, mode: str, counts: tuple[int, ...]) -> Result:
    """And behind a prefetcher."""

    def one_ahead() -> Any:
        held = None
        for batch in training.loader:
            if held is not None:
                yield held
            held = batch
        if held is not None:
            yield held

    training, averages, means = Training(rank, counts), [], []
    for _ in range(2):
        total = torch.zeros(())
        for batch in one_ahead():
            loss = training.step(batch)
            total += 1
            averages.append(average(loss).item())
        means.append(average(total).item())
    return {"averages": averages, "means": means, "parameters": training.parameters()}


class _Logging(torch.nn.Module):
    """Its forward is a whole training step, with what it logs (Lightning's way); it counts what it has seen on all ranks, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.register_buffer("seen", torch.zeros(1))
        self.logged: list[float] = []
        # As Lightning does; what a method named ``forward`` calls is part of the model.
        self.forward = self.training_step  # type: ignore[method-assign]

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.norm(self.layer(batch)).square().sum() + self.layer(batch).sum()
        with torch.no_grad():
            number = torch.tensor([float(len(batch))])
            dist.all_reduce(number)
            self.seen += number
            value = loss.detach().clone()
        dist.all_reduce(value)
        self.logged.append(value.item())
        return loss


def logs_in_forward(rank: int, world_size: int, mode: str, counts: tuple[int, ...]) -> Result:
    torch.manual_seed(0)
    training = Training(rank, counts)
    module = _Logging()
    training.model = DDP(module)
    training.optimizer = torch.optim.Adam(training.model.parameters(), lr=0.1)
    samples = torch.randn(2 * counts[rank], 4, generator=torch.Generator().manual_seed(rank))
    iterator, rows = iter(()), []
    for _ in range(2):
        iterator = iter(DataLoader(list(samples), batch_size=2))  # type: ignore[arg-type,assignment]
        while True:
            batch = next(iterator, None)
            if batch is None:
                break
            training.optimizer.zero_grad()
            training.model(batch).backward()
            training.optimizer.step()
        total = torch.tensor([float(counts[rank])])
        dist.all_reduce(total)
        rows.append(total.item())
    return {"rows": rows, "logged": module.logged, "seen": module.seen.item(), "parameters": training.parameters()}


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class _Summing(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Summed.apply(super().forward(x)) * torch.distributed.nn.functional.all_reduce(x.sum())


def communicates_in_forward(rank: int, world_size: int, mode: str, counts: tuple[int, ...]) -> Result:
    """Collectives that are part of the model: they have a counterpart in the backward."""
    import torch.distributed.nn.functional

    training = Training(rank, counts)
    training.model = DDP(_Summing(4, 2))
    training.optimizer = torch.optim.Adam(training.model.parameters(), lr=0.1)
    before = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    losses = [training.step(batch) for batch in training.loader]
    votes = dist.group.WORLD._get_sequence_number_for_group() - before  # type: ignore[union-attr]
    return {"losses": losses, "parameters": training.parameters(), "collectives": votes}


def evaluation_with_metrics(rank: int, world_size: int, mode: str, counts: tuple[int, ...]) -> Result:
    """Evaluation on shards after each epoch and within it, through the wrapper, and its sums gathered."""
    training, found = Training(rank, counts), []
    held_out = torch.randn(4, 4, generator=torch.Generator().manual_seed(100 + rank))

    def evaluate() -> None:
        training.model.eval()
        with torch.no_grad():
            value = training.model(held_out).square().sum()
        training.model.train()
        values = [torch.zeros(()) for _ in range(world_size)]
        dist.all_gather(values, value)
        found.append(torch.stack(values))

    for _ in range(2):
        for batch in training.loader:
            training.step(batch)
        evaluate()
        objects: list[Any] = [None] * world_size
        dist.all_gather_object(objects, {"rank": rank, "batches": len(training.loader)})
        found.append(objects)
    return {"found": found, "parameters": training.parameters()}


def rank_0_first(rank: int, world_size: int, mode: str, counts: tuple[int, ...]) -> Result:
    """main_process_first: the same barrier, at one place for rank 0 and at another for the rest."""
    training, order = Training(rank, counts), []
    for _ in range(2):
        for batch in training.loader:
            training.step(batch)
        if rank > 0:
            dist.barrier()
        order.append(training.parameters())
        if rank == 0:
            dist.barrier()
    return {"order": order, "parameters": training.parameters()}


def flag_from_rank_0(rank: int, world_size: int, mode: str, counts: tuple[int, ...], objects: bool = False) -> Result:
    """Rank 0 says in each step whether to stop (Lightning's signal)."""
    training, flags = Training(rank, counts), []
    for _ in range(2):
        for batch in training.loader:
            training.step(batch)
            if objects:
                signal = [{"stop": False, "from": rank}]
                dist.broadcast_object_list(signal, 0)
                flags.append(signal[0])
            else:
                flag = torch.tensor(10 + rank)
                dist.broadcast(flag, 0)
                flags.append(flag.item())
    return {"flags": flags, "parameters": training.parameters()}


def every_reduction(rank: int, world_size: int, mode: str, counts: tuple[int, ...]) -> Result:
    """All kinds of reductions in each step, of what the rank itself has; the last step's results are returned."""
    training = Training(rank, counts)
    results: dict[str, Any] = {}
    operators = {name: getattr(dist.ReduceOp, name) for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")}
    floats = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    integers = (torch.int64, torch.int32, torch.int8, torch.uint8)
    for batch in training.loader:
        training.step(batch)
        for name, op in operators.items():
            for dtype in (*floats, *integers) if name in ("SUM", "PRODUCT", "MIN", "MAX") else integers:
                value = torch.tensor([3, 5, 6], dtype=dtype) + rank
                results[f"{name} {dtype}", "own"] = value.clone()
                try:
                    dist.all_reduce(value, op=op)
                except RuntimeError as error:  # gloo does not know this one
                    value = str(error).split("\n")[0][:40]  # type: ignore[assignment]
                results[f"{name} {dtype}", "all"] = value
        complex_value = torch.tensor([1 + 2j, 3 - 1j])
        results["SUM complex", "own"] = complex_value.clone()
        dist.all_reduce(complex_value)
        results["SUM complex", "all"] = complex_value
    return {"results": results}


def every_other(rank: int, world_size: int, mode: str, counts: tuple[int, ...]) -> Result:
    """What else a rank without batches can take part in; rank 1 has most of them."""
    training, found = Training(rank, counts), []
    last = world_size - 1
    group = dist.new_group(list(range(world_size)))
    for batch in training.loader:
        training.step(batch)
        row: dict[str, Any] = {}
        value = torch.tensor([1.0 + rank])
        handle = dist.all_reduce(value, async_op=True)
        row["other work meanwhile"] = sum(range(10))
        handle.wait()
        row["asynchronous"] = value.item(), handle.is_completed()
        value = torch.tensor([1.0 + rank])
        dist.all_reduce(value, group=group)
        row["another group of all ranks"] = value.item()
        for root in (0, last):
            value = torch.tensor([1.0 + rank])
            dist.reduce(value, root)
            row[f"reduce to {root}"] = value.item() if rank == root else None
        received = torch.zeros(2)
        dist.scatter(received, [torch.full((2,), float(r)) for r in range(world_size)] if rank == 1 else None, 1)
        row["scatter"] = received.tolist()
        objects: list[Any] = [None]
        dist.scatter_object_list(objects, [f"for {r}" for r in range(world_size)] if rank == 1 else None, 1)
        row["scatter objects"] = objects
        gathered = [torch.zeros(2) for _ in range(world_size)] if rank == 0 else None
        dist.gather(torch.ones(2), gathered, 0)
        dist.gather_object(rank, [None] * world_size if rank == 0 else None, 0)
        counted = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
        dist.all_gather(counted, torch.tensor([len(batch)]))
        row["sizes"] = [int(number) for number in counted]
        together = torch.zeros(world_size, dtype=torch.int64)
        dist.all_gather_into_tensor(together, torch.tensor([len(batch)]))
        row["sizes into a tensor"] = together.tolist()
        measured = [torch.zeros(()) for _ in range(world_size)]
        dist.all_gather(measured, torch.tensor(1.5))
        row["a floating number"] = [float(number) for number in measured]
        nothing = [torch.zeros(0) for _ in range(world_size)]
        dist.all_gather(nothing, torch.zeros(0))
        part = torch.zeros(1)
        dist.reduce_scatter(part, [torch.tensor([float(r + 1)]) for r in range(world_size)])
        row["reduce_scatter"] = part.item()
        part = torch.zeros(1)
        dist.reduce_scatter_tensor(part, torch.arange(1.0, world_size + 1))
        row["reduce_scatter_tensor"] = part.item()
        dist.barrier()
        found.append(row)
    return {"rows": found, "parameters": training.parameters()}


def _dishonest(training: Training, world_size: int, which: str) -> None:
    rank = training.rank
    if which == "all_gather":
        dist.all_gather([torch.zeros(3) for _ in range(world_size)], torch.zeros(3))
    elif which == "all_gather_object":
        dist.all_gather_object([None] * world_size, rank)
    elif which == "gather to a rank that trains":
        dist.gather(torch.zeros(3), [torch.zeros(3) for _ in range(world_size)] if rank == 1 else None, 1)
    elif which == "all_to_all_single":
        dist.all_to_all_single(torch.zeros(world_size), torch.zeros(world_size))
    elif which == "all_to_all":
        dist.all_to_all([torch.zeros(1) for _ in range(world_size)], [torch.zeros(1) for _ in range(world_size)])
    elif which == "scatter from a rank without batches":
        dist.scatter(torch.zeros(1), [torch.zeros(1) for _ in range(world_size)] if rank == 0 else None, 0)
    elif which == "parameters averaged":
        for parameter in training.model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= world_size
    elif which == "new_group":
        dist.new_group(list(range(world_size)))


DISHONEST = (
    "all_gather",
    "all_gather_object",
    "gather to a rank that trains",
    "all_to_all_single",
    "all_to_all",
    "scatter from a rank without batches",
    "new_group",
    "parameters averaged",
    "broadcast never sent before",
)


def dishonest(rank: int, world_size: int, mode: str, counts: tuple[int, ...], which: str) -> Result:
    """In each step a collective in which a rank without batches cannot honestly take part."""
    training = Training(rank, counts)
    for i, batch in enumerate(training.loader):
        training.step(batch)
        if which != "broadcast never sent before":
            _dishonest(training, world_size, which)
        elif i == max(counts) - 1:
            dist.broadcast(torch.zeros(1), 0)
    return {}


def wrong_collective(rank: int, world_size: int, mode: str, which: str) -> Result:
    """A bug: the ranks call different things."""
    training = Training(rank, (3,) * world_size)
    for batch in training.loader:
        training.step(batch)
    if rank == 0:
        dist.all_reduce(torch.zeros(3))
    elif which == "another function":
        dist.all_gather([torch.zeros(3) for _ in range(world_size)], torch.zeros(3))
    elif which == "another size":
        dist.all_reduce(torch.zeros(4))
    elif which == "another type":
        dist.all_reduce(torch.zeros(3, dtype=torch.float64))
    elif which == "another operator":
        dist.all_reduce(torch.zeros(3), op=dist.ReduceOp.MAX)
    elif which == "a barrier":
        dist.barrier()
    elif which == "an asynchronous one":
        dist.all_gather([torch.zeros(1) for _ in range(world_size)], torch.zeros(1), async_op=True).wait()
    return {}


def waits(rank: int, world_size: int, mode: str) -> Result:
    """Rank 0 runs out, and waits for rank 1, which waits for something else: that rank 0 has said what it waits for."""
    logging.getLogger("ddpfix").addHandler(handler := _Kept())
    training = Training(rank, (1, 2))
    store = dist.distributed_c10d._get_default_store()
    for i, batch in enumerate(training.loader):
        if i == 1:
            store.wait(["told"])
        training.step(batch)
        dist.all_reduce(torch.zeros(1))
        if i == 0 and rank == 0:
            handler.first = lambda: store.set("told", "1")
    return {"lines": handler.lines}


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.first: Callable[[], None] = lambda: None

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.first()


def counted(rank: int, world_size: int, mode: str) -> Result:
    """What the log and status() tell about uneven epochs."""
    import ddpfix

    logger = logging.getLogger("ddpfix")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler := _Kept())
    handler.setLevel(logging.INFO)
    training = Training(rank, (2, 5))
    for _ in range(2):
        for batch in training.loader:
            training.step(batch)
    details: Any = ddpfix.status()["join_details"]
    return {"lines": [line for line in handler.lines if "uneven" in line], "details": details["process_groups"][0]}


def other_threads_and_coalescing(rank: int, world_size: int, mode: str) -> Result:
    """Collectives that are none of ours: on another thread and group, and point to point."""
    import threading

    training = Training(rank, (3, 3))
    group = dist.new_group([0, 1])
    values: list[Any] = []

    def beside() -> None:
        for _ in range(20):
            value = torch.ones(1)
            dist.all_reduce(value, group=group)
            values.append(value.item())

    thread = threading.Thread(target=beside)
    thread.start()
    received = torch.zeros(1)
    for batch in training.loader:
        training.step(batch)
        if rank == 0:
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(received, 0)
    thread.join()
    return {"values": values, "received": received, "parameters": training.parameters()}
