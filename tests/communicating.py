"""Training scripts whose model needs all ranks in its forward or backward, for test_stop.py; each runs with and without ddpfix."""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
from ranks import logged
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader


class Summed(torch.autograd.Function):
    """A sum over ranks, and over their gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any = None) -> torch.Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Centred(torch.nn.Module):
    """Takes away the mean over the batches of all ranks, as SyncBatchNorm does on a GPU."""

    def __init__(self, reduces: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.reduces = reduces
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return self.scale * x
        number = self.reduces(torch.tensor([float(len(x))], dtype=x.dtype))
        return self.scale * (x - self.reduces(x.sum(0)) / number)


class Seen(torch.nn.Module):
    """Counts what all ranks have seen, out of autograd's sight, and gathers what they look at (MoCo's way)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4, dtype=torch.float64))

    @torch.no_grad()
    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    def forward(this, x: torch.Tensor) -> torch.Tensor:  # not everybody says "self"
        if this.training:
            this.seen += this.gathered(x).abs().sum(0)  # type: ignore[has-type]
        return x


def network(reduces: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4), Centred(reduces), torch.nn.Linear(4, 1)).double()


def samples(rank: int, count: int) -> list[torch.Tensor]:
    return list(torch.randn(2 * count, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64))


class Training:
    def __init__(self, rank: int, counts: tuple[int, ...], kind: str = "function") -> None:
        self.rank, self.counts = rank, counts
        layer = {
            "function": lambda: network(Summed.apply),
            # As SyncBatchNorm it has buffers, which DDP broadcasts before each forward.
            "buffers": lambda: torch.nn.Sequential(torch.nn.BatchNorm1d(4).double(), network(Summed.apply)),
            "gather": self._gathering,
            "pairs": self._in_pairs,
            "plain": lambda: torch.nn.Linear(4, 1).double(),
        }
        torch.manual_seed(0)
        self.module = layer[kind]()
        self.model = DDP(self.module)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.data = samples(rank, counts[rank])

    @staticmethod
    def _gathering() -> torch.nn.Module:
        return torch.nn.Sequential(Seen(), torch.nn.Linear(4, 1).double())

    @staticmethod
    def _in_pairs() -> torch.nn.Module:
        """Ranks 0 and 1 need each other, and rank 2 nobody."""
        pairs = [dist.new_group(list(ranks)) for ranks in ((0, 1), (2,))[: dist.get_world_size() - 1]]
        return network(lambda x: Summed.apply(x, pairs[dist.get_rank() // 2]))

    def loader(self, **options: Any) -> DataLoader[Any]:
        return DataLoader(self.data, batch_size=2, **options)  # type: ignore[arg-type]

    def step(self, x: torch.Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.model(x).square().sum()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def picture(self) -> list[torch.Tensor]:
        return [*(p.detach().clone() for p in self.model.parameters()), *(b.clone() for b in self.model.buffers())]


def total(value: float) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.item()


def _plain(training: Training) -> Iterator[Any]:
    yield from [training.loader()] * 2


def _new_loader_each_epoch(training: Training) -> Iterator[Any]:
    for _ in range(2):
        yield training.loader()


def _enumerated(training: Training) -> Iterator[Any]:
    loader = training.loader()
    for _ in range(2):
        yield (x for _, x in enumerate(loader))


def _workers(training: Training) -> Iterator[Any]:
    loader = training.loader(num_workers=1, persistent_workers=True)
    yield from [loader] * 2


def _one_ahead(training: Training) -> Iterator[Any]:
    loader = training.loader()

    def ahead() -> Iterator[Any]:
        iterator = iter(loader)
        held = next(iterator, None)
        while held is not None:
            following = next(iterator, None)
            yield held
            held = following

    for _ in range(2):
        yield ahead()


def _two_ahead(training: Training) -> Iterator[Any]:
    loader = training.loader()

    def ahead() -> Iterator[Any]:
        iterator = iter(loader)
        held = list(itertools.islice(iterator, 2))
        while held:
            held += itertools.islice(iterator, 1)
            yield held.pop(0)

    for _ in range(2):
        yield ahead()


#: How batches come to the loop; each item that is yielded is one epoch.
WAYS: dict[str, Callable[[Training], Iterator[Any]]] = {
    "plain": _plain,
    "new loader each epoch": _new_loader_each_epoch,
    "enumerated": _enumerated,
    "workers": _workers,
    "one ahead": _one_ahead,
    "two ahead": _two_ahead,
}


def trains(
    rank: int, world_size: int, mode: str, counts: tuple[int, ...], way: str = "plain", kind: str = "function", metric: bool = True
) -> dict[str, Any]:
    """Two epochs, with the loss summed over the ranks in each step and the number of steps behind each loop."""
    training = Training(rank, counts, kind)
    losses, sums, steps, held_out = [], [], [], []
    for epoch in WAYS[way](training):
        number = 0
        for x in epoch:
            losses.append(training.step(x))
            if metric:
                sums.append(total(losses[-1]))
            number += 1
        steps.append((number, total(number)))
        if rank == 0:  # evaluation of one rank, while the others wait
            training.model.eval()
            with torch.no_grad():
                held_out.append([training.module(x).sum().item() for x in training.loader()])
            training.model.train()
        dist.barrier()
    return {"losses": losses, "sums": sums, "steps": steps, "held out": held_out, "parameters": training.picture()}


def one_process(counts: tuple[int, ...], epochs: int = 2) -> list[torch.Tensor]:
    """What ``trains`` comes to, computed by one process from all batches of as many steps as the shortest rank has."""
    model = network(lambda x: x)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    data = [samples(rank, count) for rank, count in enumerate(counts)]
    for _ in range(epochs):
        for step in range(min(counts)):
            optimizer.zero_grad()
            batch = torch.stack([x for one in data for x in one[2 * step : 2 * step + 2]])
            (model(batch).square().sum() / len(counts)).backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def counts_collectives(rank: int, world_size: int, mode: str, kind: str) -> list[int]:
    """Collectives on the process group, for an epoch of 6 batches and for one of 3, after a first one."""
    training, found = Training(rank, (6, 6), kind), []
    for number in (6, 6, 3):
        before = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
        for x in DataLoader(training.data[: 2 * number], batch_size=2):  # type: ignore[arg-type]
            training.step(x)
        found.append(dist.group.WORLD._get_sequence_number_for_group() - before)  # type: ignore[union-attr]
    return found


def restarts(rank: int, world_size: int, mode: str, counts: tuple[int, ...], kind: str) -> Any:
    """A number of steps over loaders of different lengths, each begun anew when it is through; this one runs today."""
    training, losses = Training(rank, counts, kind), []
    loader = training.loader()
    iterator = iter(loader)
    for _ in range(10):
        try:
            x = next(iterator)
        except StopIteration:
            iterator = iter(loader)
            x = next(iterator)
        losses.append(training.step(x))
    return losses, training.picture()


def cycles(rank: int, world_size: int, mode: str, counts: tuple[int, ...], kind: str) -> Any:
    """As above, with the batches of the first pass once more; this one runs today."""
    training = Training(rank, counts, kind)
    losses = [training.step(x) for x in itertools.islice(itertools.cycle(training.loader()), 10)]
    return losses, training.picture()


def a_generator_restarts(rank: int, world_size: int, mode: str, counts: tuple[int, ...], kind: str) -> Any:
    """As above, from a generator that makes new loaders; this one runs today."""
    training = Training(rank, counts, kind)

    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield from training.loader()

    losses = [training.step(x) for _, x in zip(range(10), endless())]
    return losses, training.picture()


def accumulates_endlessly(rank: int, world_size: int, mode: str, counts: tuple[int, ...], kind: str) -> Any:
    """As above, with a step after two batches; this one runs today."""
    training, losses = Training(rank, counts, kind), []

    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield from training.loader()

    for i, x in zip(range(12), endless()):
        with training.model.no_sync() if i % 2 == 0 else contextlib.nullcontext():
            loss = training.model(x).square().sum()
            loss.backward()
        losses.append(loss.item())
        if i % 2:
            training.optimizer.step()
            training.optimizer.zero_grad()
    return losses, training.picture()


def goes_on_with_dummies(rank: int, world_size: int, mode: str, counts: tuple[int, ...], kind: str) -> Any:
    """Ranks tell each other who has a batch, and one that has none makes one up; this one runs today."""
    training, losses = Training(rank, counts, kind), []
    for _ in range(2):
        iterator = iter(training.loader())
        while True:
            x = next(iterator, None)
            if total(x is not None) == 0:
                break
            losses.append(training.step(torch.zeros(2, 4, dtype=torch.float64) if x is None else x))
    return losses, training.picture()


def makes_up_what_is_missing(rank: int, world_size: int, mode: str, counts: tuple[int, ...], kind: str) -> Any:
    """As many steps as the rank with most batches has, agreed before; this one runs today."""
    training, losses = Training(rank, counts, kind), []
    for _ in range(2):
        loader, most = training.loader(), torch.tensor([counts[rank]])
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        dummies = itertools.repeat(torch.zeros(2, 4, dtype=torch.float64))
        for x in itertools.islice(itertools.chain(loader, dummies), int(most.item())):
            losses.append(training.step(x))
    return losses, training.picture()


def skips(rank: int, world_size: int, mode: str, counts: tuple[int, ...], kind: str) -> Any:
    """A rank that leaves out some of its batches, as many as it has more than the others; this one runs today."""
    training, losses = Training(rank, counts, kind), []
    for _ in range(2):
        for i, x in enumerate(training.loader()):
            if i in (1, 3)[: counts[rank] - min(counts)]:
                continue
            losses.append(training.step(x))
    return losses, training.picture()


def looks_alone(rank: int, world_size: int, mode: str, counts: tuple[int, ...], kind: str) -> Any:
    """Rank 0 goes through its training data once more between epochs, with gradients on; this one runs today."""
    training, losses = Training(rank, counts, kind), []
    loader = training.loader()
    for _ in range(3):
        for x in loader:
            losses.append(training.step(x))
        if rank == 0:
            losses.append(sum(x.sum().item() for x in loader))
        dist.barrier()
    return losses, training.picture()


def looks_alone_first(rank: int, world_size: int, mode: str, counts: tuple[int, ...], kind: str) -> Any:
    """Rank 0 goes through its training data before each epoch, in two ways, while the others wait in the first step."""
    training, losses = Training(rank, counts, kind), []
    loader = training.loader()
    for _ in range(3):
        if rank == 0:
            losses.append(sum(x.sum().item() for x in loader))
            for x in loader:
                losses.append(x.sum().item())
        for x in loader:
            losses.append(training.step(x))
    return losses, training.picture()


def looks_while_others_wait_elsewhere(rank: int, world_size: int, mode: str, counts: tuple[int, ...], kind: str) -> Any:
    """After training, rank 0 goes through its data, and the others wait for what it finds in the store."""
    training, losses = Training(rank, counts, kind), []
    loader, store = training.loader(), dist.distributed_c10d._get_default_store()
    for _ in range(2):
        for x in loader:
            losses.append(training.step(x))
    lines = logged()
    if rank == 0:
        store.set("samples", str(sum(len(x) for x in loader)))
    losses.append(float(store.get("samples")))
    # A vote that nobody answers ends with the process group's timeout, and is told.
    return losses, training.picture(), [line for line in lines if "answer" in line]


def leaves_the_model_in_evaluation(rank: int, world_size: int, mode: str, counts: tuple[int, ...], kind: str) -> Any:
    """Rank 0 alone evaluates after every other step, at the end of epochs, too, and sets the mode for training at each step."""
    training, losses = Training(rank, counts, kind), []
    loader = training.loader()
    for _ in range(3):
        for i, x in enumerate(loader):
            training.model.train()
            torch.set_grad_enabled(True)
            losses.append(training.step(x))
            if rank == 0 and i % 2:
                training.model.eval()
                torch.set_grad_enabled(False)
                losses.append(training.module(x).sum().item())
    torch.set_grad_enabled(True)
    return losses, training.picture()


def evaluates_in_a_thread(rank: int, world_size: int, mode: str, counts: tuple[int, ...], kind: str) -> Any:
    """Rank 0 alone evaluates the DDP model in a thread, within the epoch and after it, and tells the others."""
    training, losses = Training(rank, counts, kind), []
    loader = training.loader()
    # Where there are buffers, stock DDP broadcasts them in evaluation, too, which needs all ranks.
    model = training.module if kind == "buffers" else training.model

    def evaluate() -> None:
        training.model.eval()
        with torch.no_grad():
            losses.append(model(training.data[0][None]).item())
        training.model.train()

    def evaluate_in_a_thread() -> None:
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join()

    for _ in range(2):
        for i, x in enumerate(loader):
            losses.append(training.step(x))
            if i % 2:
                if rank == 0:
                    evaluate_in_a_thread()
                losses.append(total(losses[-1]))
        if rank == 0:
            evaluate_in_a_thread()
        losses.append(total(losses[-1]))
    return losses, training.picture()


def passes(rank: int, world_size: int, mode: str, counts: tuple[int, ...], kind: str) -> Any:
    """A number of steps in passes over loaders of different lengths; this one runs today."""
    training, losses, step = Training(rank, counts, kind), [], 0
    loader = training.loader()
    while step < 11:
        for x in loader:
            losses.append(training.step(x))
            step += 1
            if step >= 11:
                break
    return losses, training.picture()


def feeds_a_list(rank: int, world_size: int, mode: str, counts: tuple[int, ...], kind: str = "function") -> Any:
    """No DataLoader, so that nobody can be stopped."""
    training = Training(rank, counts, kind)
    for x in list(training.loader()):
        training.step(x)
    return training.picture()


def an_empty_epoch(rank: int, world_size: int, mode: str) -> Any:
    """A second epoch in which rank 0 has no batch."""
    training, steps = Training(rank, (3, 5)), []
    for epoch in range(3):
        number = 0
        for x in DataLoader(training.data if epoch != 1 or rank else [], batch_size=2):  # type: ignore[arg-type,var-annotated]
            training.step(x)
            number += 1
        steps.append(number)
    return {"steps": steps, "parameters": training.picture()}


def what_the_log_says(rank: int, world_size: int, mode: str, counts: tuple[int, ...], unsized: bool = False) -> list[str]:
    lines, training = logged(), Training(rank, counts)

    class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(training.data)

    for _ in range(2):
        for x in DataLoader(Stream(), batch_size=2) if unsized else training.loader():
            training.step(x)
    return [line for line in lines if "uneven inputs" in line or "communicates" in line]
