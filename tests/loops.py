"""Ordinary training scripts, as functions: the shapes that real ones have.

Nothing in a script knows of ddpfix. ``ctx.join(model)`` stands where a user would write ``with model.join():``; it does nothing unless the script
is run in the mode ``"join"``. The decorator says what a script is expected to do on inputs of different length per rank.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import io
import itertools
import math
from typing import Any, Callable, ContextManager, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

Counts = Sequence[Sequence[int]]  # for each epoch, the number of batches of each rank

BATCH = 2
FINISHES, HANGS = "finishes", "hangs"
#: What a hand-written join() makes of the uneven script: the same parameters as ddpfix, others, or it cannot run it.
EQUAL, DIFFERS, FAILS = "equal", "differs", "fails"


@dataclasses.dataclass(frozen=True)
class Script:
    """A training script and what is expected of it.

    Arguments:
        stock: whether it finishes on uneven inputs without ddpfix.
        join: what a hand-written ``join()`` makes of it on uneven inputs (``None``: there is nowhere to write one).
        simulated: one epoch of it is a step per batch index, so it can be calculated in one process; ``"stream"`` if its epochs follow each
            other without a rendezvous between them.
        same_ranks: stock DDP leaves the ranks equal on even inputs, so that they can be equal on uneven ones.
        local_buffers: its last forward is not followed by a rendezvous with a rank behind, so buffers differ as they do with stock.
        as_stock: on uneven inputs it runs to its end today, so it must do the same with ddpfix, to the bit.
        optimizers: those that it is run with; the first for comparisons with join.
        even, uneven: batches for each epoch of ranks 0, 1, 2.
        extra: an even epoch to be trained after the uneven ones.
        worlds: world sizes.
        end: "destroy" or "exit" (neither a barrier nor destroy_process_group).
    """

    function: Callable[["Context"], "Trained"]
    stock: str = HANGS
    join: str | None = EQUAL
    simulated: str | None = None
    same_ranks: bool = True
    local_buffers: bool = False
    as_stock: bool = False
    optimizers: tuple[str, ...] = ("sgd", "momentum", "adam")
    even: Counts = ((4, 4, 4), (4, 4, 4))
    uneven: Counts = ((3, 5, 4), (5, 2, 4))
    extra: int = 1
    worlds: tuple[int, ...] = (2, 3)
    end: str = "destroy"

    @property
    def name(self) -> str:
        return self.function.__name__


SCRIPTS: dict[str, Script] = {}


def script(**expected: Any) -> Callable[[Callable[["Context"], "Trained"]], Callable[["Context"], "Trained"]]:
    def enter(function: Callable[["Context"], "Trained"]) -> Callable[["Context"], "Trained"]:
        SCRIPTS[function.__name__] = Script(function, **expected)
        return function

    return enter


@dataclasses.dataclass
class Trained:
    """What a script has when it is through."""

    models: Sequence[nn.Module] = ()
    optimizers: Sequence[torch.optim.Optimizer] = ()
    values: Sequence[Any] = ()
    others: dict[str, Any] = dataclasses.field(default_factory=dict)


def picture(trained: Trained) -> dict[str, Any]:
    return copy.deepcopy(
        {
            "models": [dict(model.state_dict()) for model in trained.models],
            "optimizers": [optimizer.state_dict() for optimizer in trained.optimizers],
            "gradients": [
                {name: None if p.grad is None else p.grad.detach() for name, p in model.named_parameters()} for model in trained.models
            ],
            "values": list(trained.values),
            "others": {name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in trained.others.items()},
        }
    )


def run(rank: int, world_size: int, mode: str, name: str, counts: Counts, optimizer: str = "sgd") -> Callable[[], dict[str, Any]]:
    """The case that the rank processes run."""
    trained = SCRIPTS[name].function(Context(rank, world_size, mode, counts, optimizer))
    return lambda: picture(trained)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Data and models


def sample(rank: int, epoch: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + index + 1000 * epoch + 100_000 * rank)
    return torch.randn(4, generator=generator), torch.randn(2, generator=generator)


def batch(rank: int, epoch: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    samples = [sample(rank, epoch, BATCH * index + i) for i in range(BATCH)]
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


class Shard(Dataset):  # type: ignore[type-arg]
    """The samples of one rank, for every epoch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return sample(self.rank, index // 1000, index % 1000)


class ShardSampler(Sampler):  # type: ignore[type-arg]
    """As DistributedSampler, with ``set_epoch``, and without its padding."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = counts
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return BATCH * self.counts[self.epoch]

    def __iter__(self) -> Iterator[int]:
        return iter(range(1000 * self.epoch, 1000 * self.epoch + len(self)))


class ShardStream(IterableDataset):  # type: ignore[type-arg]
    """A stream of samples which does not know its length."""

    def __init__(self, rank: int, sampler: ShardSampler) -> None:
        self.rank = rank
        self.sampler = sampler

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index in self.sampler:
            yield sample(self.rank, index // 1000, index % 1000)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))  # type: ignore[no-any-return]


class NormNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))  # type: ignore[no-any-return]


class BranchNet(Net):
    """Uses one of two branches, chosen by the data; a third one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 8)
        self.right = nn.Linear(4, 8)
        self.never = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.left if x[0, 0] > 0 else self.right
        return self.second(torch.relu(self.first(x) + branch(x)))  # type: ignore[no-any-return]


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "sparse_adam": lambda parameters: torch.optim.SparseAdam(list(parameters), lr=0.01),
}


@dataclasses.dataclass
class Context:
    """What a script gets from its surroundings: who it is, its data, and the names of its parts."""

    rank: int
    world_size: int
    mode: str
    counts: Counts
    optimizer_name: str

    def __post_init__(self) -> None:
        self.sampler = ShardSampler([counts[self.rank] for counts in self.counts])

    @property
    def epochs(self) -> range:
        return range(len(self.counts))

    def join(self, *models: nn.Module) -> ContextManager[Any]:
        if self.mode != "join":
            return contextlib.nullcontext()
        if len(models) == 1:
            return models[0].join()  # type: ignore[no-any-return,operator]
        return Join(list(models))  # type: ignore[arg-type]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer_name](model.parameters())

    def loader(self, cls: Any = DataLoader, **arguments: Any) -> Any:
        return cls(Shard(self.rank), batch_size=BATCH, sampler=self.sampler, **arguments)

    def lists(self, epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [batch(self.rank, epoch, index) for index in range(self.counts[epoch][self.rank])]

    def held_out(self, number: int = 2) -> Any:
        """A validation loader of the same length on every rank."""
        sampler = ShardSampler([number])
        return DataLoader(Shard(self.rank + 10), batch_size=BATCH, sampler=sampler)

    def steps(self, epoch: int) -> int:
        """A number of steps that all ranks agree on, whatever their data."""
        return sum(self.counts[epoch]) // len(self.counts[epoch]) + 1

    def build(self, model: nn.Module | None = None, **arguments: Any) -> tuple[DDP, torch.optim.Optimizer]:
        model = DDP(Net() if model is None else model, **arguments)
        return model, self.optimizer(model)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def validate(model: nn.Module, loader: Iterable[Any]) -> float:
    model.eval()
    total = 0.0
    for x, y in loader:
        total += F.mse_loss(model(x), y).item()
    model.train()
    return total


# ---------------------------------------------------------------------------------------------------------------------------------------
# Loops


@script(simulated="epoch")
def plain(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                values.append(loss.item())
    return Trained([model], [optimizer], values)


@script(simulated="epoch")
def enumerated(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for step, (x, y) in enumerate(loader, start=1):
                loss = train_step(model, optimizer, x, y)
                if step % 2 == 0:
                    values.append(loss)
    return Trained([model], [optimizer], values)


@script(simulated="epoch")
def zipped(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for step, (x, y) in zip(itertools.count(), loader):
                values.append((step, train_step(model, optimizer, x, y)))
    return Trained([model], [optimizer], values)


@script(simulated="epoch")
def progress_bar(ctx: Context) -> Trained:
    from tqdm import tqdm

    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            bar = tqdm(loader, desc=f"epoch {epoch}", disable=ctx.rank != 0, file=io.StringIO())
            for x, y in bar:
                loss = train_step(model, optimizer, x, y)
                bar.set_postfix(loss=loss)
                values.append(loss)
    return Trained([model], [optimizer], values)


@script(simulated="epoch")
def progress_bar_enumerated(ctx: Context) -> Trained:
    from tqdm import tqdm

    model, optimizer = ctx.build()
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for _step, (x, y) in enumerate(tqdm(loader, file=io.StringIO())):
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script(simulated="epoch")
def one_function_per_epoch(ctx: Context) -> Trained:
    """As pytorch/examples: train() and validate() called by main(), the best model saved by rank 0."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    held_out = ctx.held_out()
    best = math.inf
    saved: dict[str, Any] = {}

    def train(epoch: int) -> None:
        model.train()
        for _i, (x, y) in enumerate(loader):
            train_step(model, optimizer, x, y)

    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            train(epoch)
        loss = validate(model.module, held_out)
        if loss < best:
            best = loss
            if ctx.rank == 0:
                saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    return Trained([model], [optimizer], [], {"best": best, "saved": saved})


@script(simulated="epoch")
def model_is_read_after_the_loop(ctx: Context) -> Trained:
    """Every rank reads its parameters right after the loop, with no collective in between."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    fingerprints = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
        fingerprints.append(torch.cat([p.detach().flatten() for p in model.parameters()]).clone())
    return Trained([model], [optimizer], [], {"same on all ranks": fingerprints})


@script(simulated="epoch")
def function_with_early_return(ctx: Context) -> Trained:
    """The loop stands in a function that returns from inside it on some ranks."""
    model, optimizer = ctx.build()
    loader = ctx.loader()

    def train() -> float:
        total = 0.0
        for x, y in loader:
            total += train_step(model, optimizer, x, y)
            if total > 1e9:
                return total
        return total

    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            values.append(train())
    return Trained([model], [optimizer], values)


@script()
def break_at_limit(ctx: Context) -> Trained:
    """One rank leaves by break where another runs out of batches."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for step, (x, y) in enumerate(loader):
                if step == 4:
                    break
                values.append(train_step(model, optimizer, x, y))
        dist.barrier()
    return Trained([model], [optimizer], values)


@script(join=DIFFERS)
def break_at_limit_without_barrier(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for step, (x, y) in enumerate(loader):
                values.append(train_step(model, optimizer, x, y))
                if step + 1 >= 4:
                    break
    return Trained([model], [optimizer], values)


@script(stock=FINISHES, join=None, as_stock=True, uneven=((4, 6, 5), (5, 7, 6)))
def equal_limit(ctx: Context) -> Trained:
    """All ranks break at the same step: uneven loaders, and nothing is uneven."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(loader):
            values.append(train_step(model, optimizer, x, y))
            if step == 2:
                break
    dist.barrier()
    return Trained([model], [optimizer], values)


@script(simulated="epoch")
def sliced(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in itertools.islice(loader, 10):
                train_step(model, optimizer, x, y)
        dist.barrier()
    return Trained([model], [optimizer])


@script(simulated="epoch")
def look_ahead(ctx: Context) -> Trained:
    """One batch ahead, as accelerate's DataLoaderShard and Lightning on data of unknown length."""
    model, optimizer = ctx.build()
    loader = ctx.loader()

    def one_ahead(iterable: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
        iterator = iter(iterable)
        try:
            current = next(iterator)
        except StopIteration:
            return
        while True:
            try:
                following = next(iterator)
            except StopIteration:
                yield current, True
                return
            yield current, False
            current = following

    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for (x, y), last in one_ahead(loader):
                values.append((train_step(model, optimizer, x, y), last))
        dist.barrier()
    return Trained([model], [optimizer], values)


@script(join=FAILS, uneven=((5, 8, 6), (11, 4, 6)), extra=2)
def look_ahead_window(ctx: Context) -> Trained:
    """A window of batches is fetched, then trained on with accumulation (Hugging Face's Trainer)."""
    model, optimizer = ctx.build()
    loader = ctx.loader()

    def window(iterator: Iterator[Any], number: int) -> list[Any]:
        batches = []
        for _ in range(number):
            try:
                batches.append(next(iterator))
            except StopIteration:
                break
        return batches

    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        iterator = iter(loader)
        with ctx.join(model):
            for _ in range(math.ceil(len(loader) / 3)):
                batches = window(iterator, 3)
                for i, (x, y) in enumerate(batches):
                    synchronise = i == len(batches) - 1
                    with contextlib.nullcontext() if synchronise else model.no_sync():
                        loss = F.mse_loss(model(x), y) / len(batches)
                        loss.backward()
                    values.append(loss.item())
                optimizer.step()
                optimizer.zero_grad()
    dist.barrier()
    return Trained([model], [optimizer], values)


@script(simulated="epoch")
def prefetched(ctx: Context) -> Trained:
    """timm's PrefetchLoader: the held batch is yielded after the loop."""
    model, optimizer = ctx.build()
    loader = ctx.loader()

    class PrefetchLoader:
        def __iter__(self) -> Iterator[Any]:
            first = True
            held: Any = None
            for following in loader:
                following = tuple(part.clone() for part in following)
                if not first:
                    yield held
                else:
                    first = False
                held = following
            yield held

    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in PrefetchLoader():
                values.append(train_step(model, optimizer, x, y))
        dist.barrier()
    return Trained([model], [optimizer], values)


@script(simulated="epoch")
def preloaded_by_next(ctx: Context) -> Trained:
    """apex's data_prefetcher: next() until None, StopIteration caught inside."""
    model, optimizer = ctx.build()
    loader = ctx.loader()

    class Prefetcher:
        def __init__(self) -> None:
            self.iterator = iter(loader)
            self.preload()

        def preload(self) -> None:
            try:
                self.following = next(self.iterator)
            except StopIteration:
                self.following = None

        def next(self) -> Any:
            current = self.following
            if current is not None:
                self.preload()
            return current

    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        prefetcher = Prefetcher()
        with ctx.join(model):
            current = prefetcher.next()
            while current is not None:
                train_step(model, optimizer, *current)
                current = prefetcher.next()
        dist.barrier()
    return Trained([model], [optimizer])


@script(join=EQUAL, simulated="stream")
def look_ahead_without_barrier(ctx: Context) -> Trained:
    """The epochs of a look-ahead loader with nothing in between: the ranks go on to their next epoch on their own."""
    model, optimizer = ctx.build()
    loader = ctx.loader()

    def one_ahead() -> Iterator[Any]:
        held = None
        for following in loader:
            if held is not None:
                yield held
            held = following
        if held is not None:
            yield held

    with ctx.join(model):
        for epoch in ctx.epochs:
            ctx.sampler.set_epoch(epoch)
            for x, y in one_ahead():
                train_step(model, optimizer, x, y)
    dist.barrier()
    return Trained([model], [optimizer])


@script(simulated="epoch")
def logged_every(ctx: Context) -> Trained:
    """torchvision's MetricLogger.log_every: a generator that ends with its loader."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    lines: list[str] = []

    class MetricLogger:
        def log_every(self, iterable: Any, every: int, header: str) -> Iterator[Any]:
            i = 0
            for item in iterable:
                yield item
                if i % every == 0:
                    lines.append(f"{header} [{i}/{len(iterable)}]")
                i += 1
            lines.append(f"{header} Total")

    logger = MetricLogger()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in logger.log_every(loader, 2, f"Epoch: [{epoch}]"):
                train_step(model, optimizer, x, y)
        dist.barrier()
    return Trained([model], [optimizer], lines)


@script(stock=FINISHES, join=None, as_stock=True)
def restarted_on_stop(ctx: Context) -> Trained:
    """As many steps on every rank; whoever runs out begins again (mmengine, DeepSpeed's RepeatingLoader)."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        iterator = iter(loader)
        for step in range(2 * ctx.steps(epoch)):
            try:
                x, y = next(iterator)
            except StopIteration:
                iterator = iter(loader)
                x, y = next(iterator)
            values.append(train_step(model, optimizer, x, y))
            if step % 3 == 2:
                dist.barrier()
    dist.barrier()
    return Trained([model], [optimizer], values)


@script(stock=FINISHES, join=None, as_stock=True)
def restarted_in_an_iterator(ctx: Context) -> Trained:
    class Repeating:
        def __init__(self, loader: Any) -> None:
            self.loader = loader
            self.iterator = iter(loader)

        def __iter__(self) -> Repeating:
            return self

        def __next__(self) -> Any:
            try:
                return next(self.iterator)
            except StopIteration:
                self.iterator = iter(self.loader)
                return next(self.iterator)

    model, optimizer = ctx.build()
    values = []
    ctx.sampler.set_epoch(0)
    for step, (x, y) in enumerate(Repeating(ctx.loader())):
        if step >= 11:
            break
        values.append(train_step(model, optimizer, x, y))
    dist.barrier()
    return Trained([model], [optimizer], values)


@script(stock=FINISHES, join=None, as_stock=True)
def generator_cycle(ctx: Context) -> Trained:
    def cycle(loader: Iterable[Any]) -> Iterator[Any]:
        while True:
            for item in loader:
                yield item

    model, optimizer = ctx.build()
    values = []
    data = cycle(ctx.loader())
    for step in range(13):
        x, y = next(data)
        values.append(train_step(model, optimizer, x, y))
        if step % 4 == 3:
            values.append(validate(model, ctx.held_out()))
            dist.barrier()
    return Trained([model], [optimizer], values)


@script(stock=FINISHES, join=None, as_stock=True)
def generator_cycle_with_for(ctx: Context) -> Trained:
    """A generator that restarts its loader, under a plain for: every StopIteration falls inside the generator."""

    def infinite(loader: Iterable[Any]) -> Iterator[Any]:
        while True:
            yield from loader

    model, optimizer = ctx.build()
    values = []
    for step, (x, y) in enumerate(infinite(ctx.loader())):
        values.append(train_step(model, optimizer, x, y))
        if step == 12:
            break
    dist.barrier()
    return Trained([model], [optimizer], values)


@script(stock=FINISHES, join=None, as_stock=True)
def itertools_cycle(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    values = []
    for _step, (x, y) in zip(range(13), itertools.cycle(ctx.loader())):
        values.append(train_step(model, optimizer, x, y))
    dist.barrier()
    return Trained([model], [optimizer], values)


@script(stock=FINISHES, join=None, as_stock=True)
def epochs_until_a_step_count(ctx: Context) -> Trained:
    """``while step < N: for batch in loader: ... break`` runs today, and is no loop over epochs."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        step = 0
        while step < 9:
            for x, y in loader:
                values.append(train_step(model, optimizer, x, y))
                step += 1
                if step >= 9:
                    break
    dist.barrier()
    return Trained([model], [optimizer], values)


@script(simulated="stream")
def lists(ctx: Context) -> Trained:
    """No DataLoader at all."""
    model, optimizer = ctx.build()
    values = []
    with ctx.join(model):
        for epoch in ctx.epochs:
            for x, y in ctx.lists(epoch):
                values.append(train_step(model, optimizer, x, y))
    return Trained([model], [optimizer], values)


@script(simulated="epoch")
def lists_with_barrier(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    for epoch in ctx.epochs:
        with ctx.join(model):
            for x, y in ctx.lists(epoch):
                train_step(model, optimizer, x, y)
        dist.barrier()
    return Trained([model], [optimizer])


@script(stock=HANGS, join=FAILS, simulated="epoch", optimizers=("sgd", "adam"))
def stop_when_told_by_barrier_per_step(ctx: Context) -> Trained:
    """A barrier in every step."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                dist.barrier()
                values.append(train_step(model, optimizer, x, y))
    return Trained([model], [optimizer], values)


@script(stock=HANGS, join=FAILS, simulated="epoch", optimizers=("sgd", "adam"))
def barrier_every_second_step(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for step, (x, y) in enumerate(loader):
                train_step(model, optimizer, x, y)
                if step % 2 == 1:
                    dist.barrier()
        dist.barrier()
    return Trained([model], [optimizer])


@script(stock=HANGS, join=FAILS, simulated="epoch", optimizers=("sgd", "adam"), uneven=((1, 4, 2), (2, 0, 2)))
def barrier_per_step_few_batches(ctx: Context) -> Trained:
    """A rank meets the others' barriers though it has hardly, or never, been in the loop itself."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                dist.barrier()
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script(stock=HANGS, join=FAILS, uneven=((5, 0, 1), (2, 4, 1)), optimizers=("sgd", "adam"))
def barrier_in_the_loop_average_after(ctx: Context) -> Trained:
    """A barrier of the loop must not meet the all-reduce that follows it."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        total = torch.zeros(1)
        with ctx.join(model):
            for step, (x, y) in enumerate(loader):
                total += train_step(model, optimizer, x, y)
                if step % 2 == 1:
                    dist.barrier()
        dist.all_reduce(total)
        values.append(total.item())
    return Trained([model], [optimizer], values)


@script(stock=FINISHES, join=None, as_stock=True)
def stop_flag(ctx: Context) -> Trained:
    """ESPnet, AllenNLP, Composer: the ranks tell each other that one has run out, and stop together."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    stop = torch.zeros(1)
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        stop.zero_()
        for x, y in loader:
            dist.all_reduce(stop)
            if stop > 0:
                break
            values.append(train_step(model, optimizer, x, y))
        else:
            stop.fill_(1)
            dist.all_reduce(stop)
    return Trained([model], [optimizer], values)


@script(stock=HANGS, join=DIFFERS)
def averaged_after_the_epoch(ctx: Context) -> Trained:
    """The loss of the epoch is averaged over ranks, after the loop."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        total = torch.zeros(2)
        with ctx.join(model):
            for x, y in loader:
                total += torch.tensor([train_step(model, optimizer, x, y), 1.0])
        dist.all_reduce(total)
        values.append((total[0] / total[1]).item())
    return Trained([model], [optimizer], values)


@script(join=EQUAL, simulated="epoch")
def validated_between_epochs(ctx: Context) -> Trained:
    """Every rank validates through the wrapper, without buffers: no collective."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    held_out = ctx.held_out()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
        values.append(validate(model, held_out))
        dist.barrier()
    return Trained([model], [optimizer], [], {"validation": values})


@script(join=FAILS, simulated="epoch")
def validated_inside_the_epoch(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    loader = ctx.loader()
    held_out = ctx.held_out()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for step, (x, y) in enumerate(loader):
                train_step(model, optimizer, x, y)
                if step % 2 == 0:
                    values.append(validate(model, held_out))
    return Trained([model], [optimizer], values)


@script(join=FAILS, simulated="epoch")
def rank_0_evaluates_inside(ctx: Context) -> Trained:
    """nanoGPT: the first rank evaluates through the wrapper every few steps, and saves."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for step, (x, y) in enumerate(loader):
                if step % 2 == 0 and ctx.rank == 0:
                    values.append(validate(model, ctx.held_out()))
                    torch.save(model.module.state_dict(), io.BytesIO())
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer], values)


@script(simulated="epoch", join=FAILS)
def rank_0_evaluates_after(ctx: Context) -> Trained:
    """The first rank evaluates and saves between the epochs, the others wait."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    file = io.BytesIO()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
        if ctx.rank == 0:
            values.append(validate(model, ctx.held_out()))
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        dist.barrier()
    saved = torch.load(io.BytesIO(file.getvalue())) if ctx.rank == 0 else None
    return Trained([model], [optimizer], values, {"saved": saved})


@script(simulated="epoch")
def statistics_before_training(ctx: Context) -> Trained:
    """A pass over the training loader without any training: not a loop that fed training steps."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        values.append(sum(float(x.sum()) for x, _ in loader))
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
        values.append(sum(1 for _ in loader))
    return Trained([model], [optimizer], values)


@script(simulated="epoch", uneven=((0, 3, 2), (2, 0, 3)))
def empty_rank(ctx: Context) -> Trained:
    """A rank without any batch."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                values.append(train_step(model, optimizer, x, y))
    return Trained([model], [optimizer], values)


@script(simulated="epoch", uneven=((0, 3, 0), (0, 2, 1)), extra=1)
def empty_rank_throughout(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
        dist.barrier()
    return Trained([model], [optimizer])


@script(simulated="epoch", uneven=((3, 9, 1), (1, 2, 12)))
def very_uneven(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script(simulated="epoch", end="exit")
def ends_without_barrier(ctx: Context) -> Trained:
    """Neither a barrier nor destroy_process_group: the interpreter just exits."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script(simulated="stream", end="exit")
def lists_end_without_barrier(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    with ctx.join(model):
        for epoch in ctx.epochs:
            for x, y in ctx.lists(epoch):
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script(simulated="stream")
def destroys_the_group(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    with ctx.join(model):
        for epoch in ctx.epochs:
            for x, y in ctx.lists(epoch):
                train_step(model, optimizer, x, y)
    dist.destroy_process_group()
    return Trained([model], [optimizer])


@script(simulated="epoch", optimizers=("sgd", "adam"))
def forked_workers(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    loader = ctx.loader(num_workers=2, multiprocessing_context="fork")
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script(simulated="epoch", optimizers=("adam",), worlds=(2,), join=DIFFERS, even=((3, 3),), uneven=((1, 3),))
def spawned_workers(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    loader = ctx.loader(num_workers=1, multiprocessing_context="spawn")
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script(simulated="epoch", optimizers=("sgd", "adam"))
def persistent_workers(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    loader = ctx.loader(num_workers=1, multiprocessing_context="fork", persistent_workers=True)
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script(simulated="epoch")
def iterable_shards(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    loader = DataLoader(ShardStream(ctx.rank, ctx.sampler), batch_size=BATCH)
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script(simulated="epoch")
def stateful_loader(ctx: Context) -> Trained:
    from torchdata.stateful_dataloader import StatefulDataLoader

    model, optimizer = ctx.build()
    loader = ctx.loader(StatefulDataLoader)
    state = None
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
                state = loader.state_dict()
        dist.barrier()
    assert state is None or isinstance(state, dict)
    return Trained([model], [optimizer])


@script(join=DIFFERS, uneven=((4, 6, 5), (6, 3, 5)), extra=2)
def skipped_batches(ctx: Context) -> Trained:
    """One rank skips a bad batch in the middle."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for step, (x, y) in enumerate(loader):
                if len(loader) != 4 and step == ctx.rank + 1:
                    continue
                values.append(train_step(model, optimizer, x, y))
    return Trained([model], [optimizer], values)


@script()
def zip_of_two_loaders(ctx: Context) -> Trained:
    """The shorter of two loaders ends the loop; the other one never raises."""
    model, optimizer = ctx.build()
    first = ctx.loader()
    second = DataLoader(Shard(ctx.rank + 20), batch_size=BATCH, sampler=ShardSampler([4]))
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for (x, y), (u, v) in zip(first, second):
                values.append(train_step(model, optimizer, torch.cat([x, u]), torch.cat([y, v])))
        dist.barrier()
    return Trained([model], [optimizer], values)


@script()
def zip_of_two_loaders_without_barrier(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    first = ctx.loader()
    second = DataLoader(Shard(ctx.rank + 20), batch_size=BATCH, sampler=ShardSampler([4]))
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for (x, y), (u, v) in zip(first, second):
                train_step(model, optimizer, torch.cat([x, u]), torch.cat([y, v]))
    return Trained([model], [optimizer])


@script()
def inner_loader_restarts(ctx: Context) -> Trained:
    """Semi-supervised: the loader of unlabelled data begins again while that of labelled data goes on."""
    model, optimizer = ctx.build()
    labelled = ctx.loader()
    unlabelled = DataLoader(Shard(ctx.rank + 20), batch_size=BATCH, sampler=ShardSampler([2 + ctx.rank]))
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        iterator = iter(unlabelled)
        with ctx.join(model):
            for x, y in labelled:
                try:
                    u, v = next(iterator)
                except StopIteration:
                    iterator = iter(unlabelled)
                    u, v = next(iterator)
                values.append(train_step(model, optimizer, torch.cat([x, u]), torch.cat([y, v])))
    return Trained([model], [optimizer], values)


@script(join=EQUAL)
def inner_loop_in_a_loop(ctx: Context) -> Trained:
    """For each batch of an outer loader, all batches of an inner one; both are trained on."""
    model, optimizer = ctx.build()
    outer = ctx.loader()
    inner = DataLoader(Shard(ctx.rank + 20), batch_size=BATCH, sampler=ShardSampler([2]))
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in outer:
                train_step(model, optimizer, x, y)
                for u, v in inner:
                    train_step(model, optimizer, u, v)
        dist.barrier()
    return Trained([model], [optimizer])


@script(join=EQUAL, uneven=((1, 2, 2), (2, 1, 2)))
def uneven_inner_loop(ctx: Context) -> Trained:
    """An inner loader of different length per rank, for each batch of an outer one: that ends with the outer one only."""
    model, optimizer = ctx.build()
    outer = ctx.loader()
    number = 2 if len(set(ctx.counts[0])) == 1 else 2 + ctx.rank
    inner = DataLoader(Shard(ctx.rank + 20), batch_size=BATCH, sampler=ShardSampler([number]))
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in outer:
                for u, v in inner:
                    train_step(model, optimizer, torch.cat([x, u]), torch.cat([y, v]))
        dist.barrier()
    return Trained([model], [optimizer])


@script(stock=FINISHES, join=None, as_stock=True)
def sampled_from_an_inner_loader(ctx: Context) -> Trained:
    """Domain mixing: each step takes from one of two loaders, restarted in turn; the step count is common."""
    model, optimizer = ctx.build()
    loaders = [ctx.loader(), DataLoader(Shard(ctx.rank + 20), batch_size=BATCH, sampler=ShardSampler([2 + ctx.rank]))]
    iterators = [iter(loader) for loader in loaders]
    values = []
    for step in range(14):
        which = step % 2
        batch_ = next(iterators[which], None)
        if batch_ is None:
            iterators[which] = iter(loaders[which])
            batch_ = next(iterators[which])
        values.append(train_step(model, optimizer, *batch_))
    return Trained([model], [optimizer], values)


@script(join=None, even=((4, 4, 4),), uneven=((3, 5, 4),))
def dropped_model(ctx: Context) -> Trained:
    """The model is local to a function and gone while other ranks still train."""
    values = []

    def main() -> None:
        model, optimizer = ctx.build()
        loader = ctx.loader()
        for epoch in ctx.epochs:
            ctx.sampler.set_epoch(epoch)
            for x, y in ctx.lists(epoch) if ctx.world_size == 3 else loader:
                values.append(train_step(model, optimizer, x, y))

    main()
    gc.collect()
    dist.barrier()
    return Trained([], [], values)


@script(join=None, even=((4, 4, 4),), uneven=((3, 5, 4),))
def dropped_model_of_a_list(ctx: Context) -> Trained:
    values = []
    model, optimizer = ctx.build()
    for x, y in ctx.lists(0):
        values.append(train_step(model, optimizer, x, y))
    del model, optimizer
    gc.collect()
    return Trained([], [], values)


@script(join=EQUAL)
def several_loaders_in_turn(ctx: Context) -> Trained:
    """A loop per data set, one after the other, in every epoch (curriculum)."""
    model, optimizer = ctx.build()
    first = ctx.loader()
    number = 3 if len(set(ctx.counts[0])) == 1 else 3 - ctx.rank
    second = DataLoader(Shard(ctx.rank + 20), batch_size=BATCH, sampler=ShardSampler([number]))
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in first:
                train_step(model, optimizer, x, y)
        with ctx.join(model):
            for x, y in second:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script(join=DIFFERS)
def model_is_built_anew(ctx: Context) -> Trained:
    """Two trainings in one process, each with its own model (cross-validation)."""
    trained = Trained([], [])
    models, optimizers = [], []
    for _fold in range(2):
        torch.manual_seed(_fold)
        model, optimizer = ctx.build()
        loader = ctx.loader()
        for epoch in ctx.epochs:
            ctx.sampler.set_epoch(epoch)
            with ctx.join(model):
                for x, y in loader:
                    train_step(model, optimizer, x, y)
        models.append(model)
        optimizers.append(optimizer)
    trained.models, trained.optimizers = models, optimizers
    return trained


# ---------------------------------------------------------------------------------------------------------------------------------------
# Models and options of DDP


@script(join=DIFFERS)
def batch_norm(ctx: Context) -> Trained:
    model, optimizer = ctx.build(NormNet())
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                values.append(train_step(model, optimizer, x, y))
    return Trained([model], [optimizer], values)


@script(join=DIFFERS)
def batch_norm_validated(ctx: Context) -> Trained:
    """The first forward of the validation broadcasts the buffers: a collective."""
    model, optimizer = ctx.build(NormNet())
    loader = ctx.loader()
    held_out = ctx.held_out()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
        values.append(validate(model, held_out))
    return Trained([model], [optimizer], [], {"validation": values})


@script(join=DIFFERS, uneven=((0, 3, 2), (3, 2, 3)))
def batch_norm_empty_rank(ctx: Context) -> Trained:
    model, optimizer = ctx.build(NormNet())
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script(join=DIFFERS)
def batch_norm_lists(ctx: Context) -> Trained:
    model, optimizer = ctx.build(NormNet())
    with ctx.join(model):
        for epoch in ctx.epochs:
            for x, y in ctx.lists(epoch):
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script(same_ranks=False, join=DIFFERS)
def batch_norm_not_broadcast(ctx: Context) -> Trained:
    """With broadcast_buffers=False every rank keeps its own statistics."""
    model, optimizer = ctx.build(NormNet(), broadcast_buffers=False)
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


def _accumulate(ctx: Context, every: int, *, step_at_end: bool, lists: bool = False) -> Trained:
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        optimizer.zero_grad()
        with ctx.join(model):
            for i, (x, y) in enumerate(ctx.lists(epoch) if lists else loader):
                synchronise = (i + 1) % every == 0 or (step_at_end and i + 1 == len(loader))
                with contextlib.nullcontext() if synchronise else model.no_sync():
                    loss = F.mse_loss(model(x), y) / every
                    loss.backward()
                values.append(loss.item())
                if synchronise:
                    optimizer.step()
                    optimizer.zero_grad()
        dist.barrier()
    return Trained([model], [optimizer], values)


@script(join=EQUAL, uneven=((4, 6, 2), (6, 2, 4)), extra=2)
def accumulation(ctx: Context) -> Trained:
    return _accumulate(ctx, 2, step_at_end=False)


@script(join=DIFFERS, even=((5, 5, 5), (5, 5, 5)), uneven=((3, 5, 4), (5, 4, 7)), extra=2)
def accumulation_with_a_rest(ctx: Context) -> Trained:
    """The last batch of an epoch is accumulated and never stepped on."""
    return _accumulate(ctx, 2, step_at_end=False)


@script(join=FAILS, even=((5, 5, 5), (5, 5, 5)), uneven=((3, 6, 4), (5, 4, 7)), extra=2)
def accumulation_steps_at_the_end(ctx: Context) -> Trained:
    """A rank synchronises on its own last batch (accelerate, Lightning, timm)."""
    return _accumulate(ctx, 2, step_at_end=True)


@script(join=FAILS, even=((7, 7, 7), (4, 4, 4)), uneven=((7, 4, 5), (5, 8, 3)), extra=3)
def accumulation_by_three(ctx: Context) -> Trained:
    return _accumulate(ctx, 3, step_at_end=True, lists=True)


@script(join=DIFFERS, even=((5, 5, 5), (5, 5, 5)), uneven=((3, 5, 4), (5, 4, 7)), extra=2, optimizers=("sgd", "adam"), local_buffers=True)
def accumulation_with_batch_norm(ctx: Context) -> Trained:
    model, optimizer = ctx.build(NormNet())
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        optimizer.zero_grad()
        with ctx.join(model):
            for i, (x, y) in enumerate(loader):
                if i % 2 == 0:
                    with model.no_sync():
                        F.mse_loss(model(x), y).backward()
                else:
                    F.mse_loss(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        dist.barrier()
    return Trained([model], [optimizer])


@script(join=EQUAL)
def accumulation_without_no_sync(ctx: Context) -> Trained:
    """Every backward synchronises, a step every second one: the usual mistake, which works."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        optimizer.zero_grad()
        with ctx.join(model):
            for i, (x, y) in enumerate(loader):
                F.mse_loss(model(x), y).backward()
                if i % 2 == 1 or i + 1 == len(loader):
                    optimizer.step()
                    optimizer.zero_grad()
    return Trained([model], [optimizer])


@script(join=DIFFERS)
def unused_parameters(ctx: Context) -> Trained:
    """Branches chosen by the data of the rank; one never used, whose gradient must stay None."""
    model, optimizer = ctx.build(BranchNet(), find_unused_parameters=True)
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                values.append(train_step(model, optimizer, x, y))
                assert model.module.never.weight.grad is None or ctx.mode == "join"
    return Trained([model], [optimizer], values)


@script(join=DIFFERS, uneven=((0, 3, 2), (3, 2, 3)))
def unused_parameters_empty_rank(ctx: Context) -> Trained:
    model, optimizer = ctx.build(BranchNet(), find_unused_parameters=True)
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script()
def static_graph(ctx: Context) -> Trained:
    model, optimizer = ctx.build(static_graph=True)
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script(join=FAILS, uneven=((0, 3, 2), (3, 3, 1)), simulated="epoch")
def static_graph_empty_rank(ctx: Context) -> Trained:
    """The first training iteration of a static graph is different, and this rank shadows it."""
    model, optimizer = ctx.build(static_graph=True)
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script(join=FAILS, uneven=((1, 3, 2), (3, 0, 1)))
def static_graph_with_unused(ctx: Context) -> Trained:
    """Static graph and find_unused_parameters, with a parameter that is never used."""

    class Fixed(BranchNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.relu(self.first(x) + self.left(x)))  # type: ignore[no-any-return]

    model, optimizer = ctx.build(Fixed(), static_graph=True, find_unused_parameters=True)
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script(simulated="epoch")
def bucket_views(ctx: Context) -> Trained:
    model, optimizer = ctx.build(gradient_as_bucket_view=True)
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script(simulated="epoch")
def several_buckets(ctx: Context) -> Trained:
    """Buckets so small that each parameter has its own."""
    model, optimizer = ctx.build(bucket_cap_mb=1e-5)
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script()
def fp16_hook(ctx: Context) -> Trained:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model, optimizer = ctx.build()
    model.register_comm_hook(None, fp16_compress_hook)
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script(join=DIFFERS)
def powersgd_hook(ctx: Context) -> Trained:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

    model, optimizer = ctx.build()
    state = powersgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, powersgd.powerSGD_hook)
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


class SparseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.words((x.abs() * 3).long().clamp(max=9)).mean(1)[:, :2]


def _sparse(ctx: Context) -> Trained:
    model, optimizer = ctx.build(SparseNet())
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script(optimizers=("sgd", "sparse_adam"))
def sparse_gradients(ctx: Context) -> Trained:
    return _sparse(ctx)


@script(optimizers=("sgd", "sparse_adam"), join=FAILS, uneven=((0, 3, 2), (3, 2, 3)))
def sparse_gradients_empty_rank(ctx: Context) -> Trained:
    return _sparse(ctx)


@script(optimizers=("sgd",), join=EQUAL)
def sparse_and_dense(ctx: Context) -> Trained:
    class Mixed(SparseNet):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.dense(x)

    model, optimizer = ctx.build(Mixed())
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script()
def frozen_parameters(ctx: Context) -> Trained:
    net = Net()
    net.first.weight.requires_grad_(False)
    model, optimizer = ctx.build(net)
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script(join=DIFFERS)
def several_parameter_groups(ctx: Context) -> Trained:
    model = DDP(Net())
    optimizer = torch.optim.SGD(
        [{"params": model.module.first.parameters(), "lr": 0.1}, {"params": model.module.second.parameters(), "momentum": 0.5}], lr=0.05
    )
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
        optimizer.param_groups[0]["lr"] *= 0.5
    return Trained([model], [optimizer])


# ---------------------------------------------------------------------------------------------------------------------------------------
# Several models


def _critic() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))


def _gan(ctx: Context, order: str) -> Trained:
    g, g_optimizer = ctx.build()
    d, d_optimizer = ctx.build(_critic())
    loader = ctx.loader()
    values = []

    def train_d(x: torch.Tensor, y: torch.Tensor) -> None:
        d_optimizer.zero_grad()
        loss = F.softplus(-d(y)).mean() + F.softplus(d(g(x).detach())).mean()
        loss.backward()
        d_optimizer.step()
        values.append(loss.item())

    def train_g(x: torch.Tensor) -> None:
        g_optimizer.zero_grad()
        loss = F.softplus(-d(g(x))).mean()
        loss.backward()
        g_optimizer.step()
        values.append(loss.item())

    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(g, d):
            for x, y in loader:
                if order == "dg":
                    train_d(x, y)
                    train_g(x)
                elif order == "gd":
                    train_g(x)
                    train_d(x, y)
                else:
                    train_d(x, y)
                    train_d(x, y)
                    train_g(x)
    return Trained([g, d], [g_optimizer, d_optimizer], values)


@script(join=FAILS)
def gan(ctx: Context) -> Trained:
    return _gan(ctx, "dg")


@script(join=FAILS)
def gan_generator_first(ctx: Context) -> Trained:
    return _gan(ctx, "gd")


@script(join=FAILS, optimizers=("sgd", "adam"))
def gan_two_critic_steps(ctx: Context) -> Trained:
    return _gan(ctx, "ddg")


@script(join=FAILS, optimizers=("sgd", "adam"))
def gan_separate_backwards(ctx: Context) -> Trained:
    """Two forwards and two backwards of D, and G's backward through a D that does not require gradients."""
    g, g_optimizer = ctx.build()
    d, d_optimizer = ctx.build(_critic())
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(g, d):
            for x, y in loader:
                fake = g(x)
                d_optimizer.zero_grad()
                F.softplus(-d(y)).mean().backward()
                F.softplus(d(fake.detach())).mean().backward()
                d_optimizer.step()
                g_optimizer.zero_grad()
                loss = F.softplus(-d.module(fake)).mean()
                loss.backward()
                g_optimizer.step()
                values.append(loss.item())
    return Trained([g, d], [g_optimizer, d_optimizer], values)


@script(join=FAILS)
def two_forwards_one_backward(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y) + F.mse_loss(model(x + 1), y)
                loss.backward()
                optimizer.step()
                values.append(loss.item())
    return Trained([model], [optimizer], values)


@script(join=FAILS)
def chained_models(ctx: Context) -> Trained:
    """Encoder and decoder are wrapped each for itself; one backward goes through both."""
    encoder, encoder_optimizer = ctx.build(nn.Linear(4, 4))
    decoder, decoder_optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(encoder, decoder):
            for x, y in loader:
                encoder_optimizer.zero_grad()
                decoder_optimizer.zero_grad()
                loss = F.mse_loss(decoder(torch.tanh(encoder(x))), y)
                loss.backward()
                encoder_optimizer.step()
                decoder_optimizer.step()
                values.append(loss.item())
    return Trained([encoder, decoder], [encoder_optimizer, decoder_optimizer], values)


@script(join=FAILS)
def one_optimizer_for_two_models(ctx: Context) -> Trained:
    a = DDP(nn.Linear(4, 4))
    b = DDP(Net())
    optimizer = ctx.optimizer(nn.ModuleList([a, b]))
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(a, b):
            for x, y in loader:
                optimizer.zero_grad()
                F.mse_loss(b(a(x)), y).backward()
                optimizer.step()
    return Trained([a, b], [optimizer])


@script(join=FAILS)
def models_in_turn(ctx: Context) -> Trained:
    """Two models trained on alternating batches."""
    first, first_optimizer = ctx.build()
    second, second_optimizer = ctx.build()
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(first, second):
            for i, (x, y) in enumerate(loader):
                if i % 2 == 0:
                    train_step(first, first_optimizer, x, y)
                else:
                    train_step(second, second_optimizer, x, y)
    return Trained([first, second], [first_optimizer, second_optimizer])


@script(stock=FINISHES, join=None, worlds=(2,), as_stock=True, same_ranks=False)
def model_without_ddp(ctx: Context) -> Trained:
    """A model that was never wrapped is trained by its rank alone, beside an untouched group."""
    torch.manual_seed(ctx.rank)
    model = Net()
    optimizer = ctx.optimizer(model)
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        for x, y in loader:
            train_step(model, optimizer, x, y)
    dist.barrier()
    return Trained([model], [optimizer])


@script(worlds=(3,), join=DIFFERS, same_ranks=False)
def subgroup(ctx: Context) -> Trained:
    """DDP over ranks 0 and 1 of 3; rank 2 trains a model of its own."""
    group = dist.new_group([0, 1])
    net = Net()
    model: nn.Module = DDP(net, process_group=group) if ctx.rank < 2 else net
    optimizer = ctx.optimizer(model)
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model) if ctx.rank < 2 else contextlib.nullcontext():
            for x, y in loader:
                train_step(model, optimizer, x, y)
        dist.barrier()
    return Trained([model], [optimizer], [], {"same on ranks 0 and 1": net})


@script(worlds=(3,), join=DIFFERS, same_ranks=False)
def overlapping_subgroups(ctx: Context) -> Trained:
    """Two models over different groups of ranks."""
    left, right = dist.new_group([0, 1]), dist.new_group([1, 2])
    models = []
    if ctx.rank in (0, 1):
        models.append(DDP(Net(), process_group=left))
    if ctx.rank in (1, 2):
        models.append(DDP(Net(), process_group=right))
    optimizers = [ctx.optimizer(model) for model in models]
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        for model, optimizer in zip(models, optimizers):
            with ctx.join(model):
                for x, y in loader:
                    train_step(model, optimizer, x, y)
    return Trained(models, optimizers)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Steps


@script(join=DIFFERS, optimizers=("sgd", "adam"))
def gradient_scaler(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.mse_loss(model(x).float(), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                values.append((loss.item(), scaler.get_scale()))
    return Trained([model], [optimizer], values, {"same on all ranks: scale": scaler})


@script(join=DIFFERS)
def schedule_per_step(ctx: Context) -> Trained:
    """The learning rate of the next step is calculated from that of the last one."""
    model, optimizer = ctx.build()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
                scheduler.step()
    return Trained([model], [optimizer])


@script(join=DIFFERS)
def warmup_per_step(ctx: Context) -> Trained:
    """The learning rate is calculated from the number of steps that the scheduler has counted."""
    model, optimizer = ctx.build()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 12))
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
                scheduler.step()
    return Trained([model], [optimizer])


@script(join=EQUAL)
def schedule_per_epoch(ctx: Context) -> Trained:
    """torchvision: the scheduler steps right after the loop, before any collective."""
    model, optimizer = ctx.build()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
        scheduler.step()
    return Trained([model], [optimizer], [], {"scheduler": scheduler})


@script()
def clipped_gradients(ctx: Context) -> Trained:
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                values.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
                optimizer.step()
    return Trained([model], [optimizer], values)


@script(join=DIFFERS)
def gradients_zeroed_in_place(ctx: Context) -> Trained:
    """Gradients are kept and zeroed, and zeroed after the step."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    return Trained([model], [optimizer])


@script(optimizers=("sgd", "adam"), simulated="epoch")
def compiled_ddp(ctx: Context) -> Trained:
    """torch.compile(DDP(model))."""
    model, optimizer = ctx.build()
    compiled = torch.compile(model, backend="eager")
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(compiled, optimizer, x, y)  # type: ignore[arg-type]
    return Trained([model], [optimizer])


@script(optimizers=("sgd", "adam"), simulated="epoch")
def ddp_of_compiled(ctx: Context) -> Trained:
    """DDP(torch.compile(model))."""
    model, optimizer = ctx.build(torch.compile(Net(), backend="eager"))  # type: ignore[arg-type]
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
    return Trained([model], [optimizer])


@script(join=EQUAL)
def gradient_penalty(ctx: Context) -> Trained:
    """autograd.grad on the outputs, with a graph, then a backward through both."""
    model, optimizer = ctx.build(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                x = x.clone().requires_grad_(True)
                output = model(x)
                (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
                loss = F.mse_loss(output, y) + 0.1 * slope.pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                values.append(loss.item())
    return Trained([model], [optimizer], values)


@script(join=FAILS)
def adversarial_step(ctx: Context) -> Trained:
    """FGSM: the gradient with respect to the input, without any backward, then a normal step on what it gave."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                x = x.clone().requires_grad_(True)
                (slope,) = torch.autograd.grad(F.mse_loss(model(x), y), x)
                values.append(train_step(model, optimizer, (x + 0.1 * slope.sign()).detach(), y))
    return Trained([model], [optimizer], values)


@script(stock=HANGS, join=FAILS)
def adversarial_step_on_some_ranks(ctx: Context) -> Trained:
    """As before, but only the first rank does it: a gradient that reaches an output need not become a collective."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                if ctx.rank == 0:
                    x = x.clone().requires_grad_(True)
                    (slope,) = torch.autograd.grad(F.mse_loss(model(x), y), x)
                    x = (x + 0.1 * slope.sign()).detach()
                values.append(train_step(model, optimizer, x, y))
    return Trained([model], [optimizer], values)


def _checkpointed(ctx: Context, use_reentrant: bool) -> Trained:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(self.first, x, use_reentrant=use_reentrant)
            return self.second(torch.relu(hidden))  # type: ignore[no-any-return]

    model, optimizer = ctx.build(Checkpointed())
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x.clone().requires_grad_(use_reentrant), y)
    return Trained([model], [optimizer])


@script(simulated="epoch")
def checkpointing(ctx: Context) -> Trained:
    return _checkpointed(ctx, use_reentrant=False)


@script(simulated="epoch")
def checkpointing_reentrant(ctx: Context) -> Trained:
    return _checkpointed(ctx, use_reentrant=True)


@script(optimizers=("lbfgs",), join=DIFFERS)
def lbfgs(ctx: Context) -> Trained:
    """Several forwards and backwards inside one step."""
    model = DDP(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=3)
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:

                def closure() -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = F.mse_loss(model(x), y)  # noqa: B023
                    loss.backward()
                    return loss

                values.append(float(optimizer.step(closure)))  # type: ignore[arg-type]
    return Trained([model], [optimizer], values)


@script(same_ranks=False, join=DIFFERS)
def two_backwards(ctx: Context) -> Trained:
    """Two backwards through one forward: DDP reduces only the first, so stock leaves the ranks different."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                optimizer.zero_grad()
                output = model(x)
                first = F.mse_loss(output, y)
                first.backward(retain_graph=True)
                (0.1 * output.pow(2).mean()).backward()
                optimizer.step()
                values.append(first.item())
    return Trained([model], [optimizer], values)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: list[torch.Tensor]
    extra: dict[str, Any]


@script()
def dataclass_output(ctx: Context) -> Trained:
    class Structured(Net):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            hidden = torch.relu(self.first(x))
            return Output(self.second(hidden), [hidden], {"inputs": x, "none": None})

    model, optimizer = ctx.build(Structured())
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                optimizer.zero_grad()
                output = model(x)
                (F.mse_loss(output.logits, y) + 0.01 * output.hidden[0].mean()).backward()
                optimizer.step()
    return Trained([model], [optimizer])


@script()
def dict_output(ctx: Context) -> Trained:
    class Structured(Net):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            hidden = torch.relu(self.first(x))
            logits = self.second(hidden)
            return {"logits": logits, "nested": {"hidden": (hidden, [logits])}, "number": 3}

    model, optimizer = ctx.build(Structured(), find_unused_parameters=True)
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                optimizer.zero_grad()
                F.mse_loss(model(x)["nested"]["hidden"][1][0], y).backward()
                optimizer.step()
    return Trained([model], [optimizer])


@script()
def loss_inside_the_model(ctx: Context) -> Trained:
    """The model returns the loss, and the output has no batch dimension (Hugging Face)."""

    class WithLoss(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:  # type: ignore[override]
            logits = super().forward(x)
            return (F.mse_loss(logits, y), logits.detach()) if y is not None else (logits,)

    model, optimizer = ctx.build(WithLoss())
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                optimizer.zero_grad()
                loss = model(x, y=y)[0]
                loss.backward()
                optimizer.step()
                values.append(loss.item())
    return Trained([model], [optimizer], values)


@script(join=FAILS)
def forward_without_backward(ctx: Context) -> Trained:
    """A training forward whose backward is left out, because the loss is not finite: here of the second and the last batch."""
    model, optimizer = ctx.build()
    loader = ctx.loader()
    values = []
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for i, (x, y) in enumerate(loader):
                loss = F.mse_loss(model(x), y)
                if i in (1, 3):
                    continue
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                values.append(loss.item())
    return Trained([model], [optimizer], values)


@script(simulated="epoch")
def hooks_on_parameters(ctx: Context) -> Trained:
    """The script has hooks of its own on parameters and on the output."""
    model, optimizer = ctx.build()
    seen: list[int] = []
    for p in model.parameters():
        p.register_hook(lambda gradient: seen.append(gradient.numel()))  # type: ignore[arg-type,return-value]
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                optimizer.zero_grad()
                output = model(x)
                output.register_hook(lambda gradient: seen.append(-gradient.numel()))
                F.mse_loss(output, y).backward()
                optimizer.step()
    return Trained([model], [optimizer], sorted(seen))


@script(join=EQUAL)
def averaged_weights(ctx: Context) -> Trained:
    """An exponential moving average, updated by every step of the rank itself, and evaluated."""
    model, optimizer = ctx.build()
    average = torch.optim.swa_utils.AveragedModel(model.module, avg_fn=lambda a, p, n: 0.9 * a + 0.1 * p)
    loader = ctx.loader()
    for epoch in ctx.epochs:
        ctx.sampler.set_epoch(epoch)
        with ctx.join(model):
            for x, y in loader:
                train_step(model, optimizer, x, y)
                average.update_parameters(model.module)
        validate(average, ctx.held_out())
    return Trained([model], [optimizer], [], {"average": average})
