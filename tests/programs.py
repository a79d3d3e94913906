"""Random training programs: drawn from a seed as plain data, and carried out by the ranks.

A program is what a script would be: models with options of DDP, and for each epoch a kind of loop, what one step does with the models,
accumulation, evaluation and barriers inside, and what follows the loop. Later kinds of things go into the tables below and get a branch in
:class:`Interpreter`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import random
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from loops import OPTIMIZERS, BranchNet, Context, Net, NormNet, SparseNet, Trained, picture, validate
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODELS: dict[str, Callable[[], nn.Module]] = {"net": Net, "norm": NormNet, "branch": BranchNet, "sparse": SparseNet}
LOOPS = ("for", "enumerate", "generator", "look ahead", "window", "next", "limit", "list", "restart", "zip")
#: Those of them whose end ddpfix sees.
SEEN = ("for", "enumerate", "generator", "zip")
#: What a step does with several models: a backward for each, one for all, one model per step, or two forwards of each before its backward.
STEPS = ("each", "sum", "alternate", "two forwards")
AFTER = ("barrier", "evaluate", "average", "rank 0 saves", "schedule", "count batches")


@dataclasses.dataclass(frozen=True)
class Model:
    kind: str
    optimizer: str
    options: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Epoch:
    loop: str
    step: str
    counts: tuple[int, ...]
    limit: int
    accumulate: int
    step_at_end: bool
    evaluate_every: int
    rank_0_evaluates: bool
    barrier_every: int
    after: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    seed: int
    world_size: int
    models: tuple[Model, ...]
    epochs: tuple[Epoch, ...]
    end: str

    @property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        return tuple(epoch.counts for epoch in self.epochs)

    def __str__(self) -> str:
        lines = [f"program {self.seed} on {self.world_size} ranks, ends by {self.end}"]
        return "\n    ".join([*lines, *map(str, self.models), *map(str, self.epochs)])


def draw(seed: int, uneven: bool) -> Program:
    """Draws a program.

    Arguments:
        seed: the same seed gives the same program.
        uneven: ranks have different numbers of batches, some none at all.
    """
    rng = random.Random(f"{seed} {'uneven' if uneven else 'even'}")
    world_size = rng.choice((2, 2, 3))
    models = tuple(_draw_model(rng) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    epochs = tuple(_draw_epoch(rng, world_size, models, uneven) for _ in range(rng.randint(2, 4)))
    if uneven and len(models) > 1:
        # Ranks that have come apart may be in different epochs, where a backward of one model cannot pair with that of another.
        epochs = tuple(dataclasses.replace(epoch, step=epochs[0].step, accumulate=epochs[0].accumulate) for epoch in epochs)
    return Program(seed, world_size, models, epochs, rng.choice(("destroy", "destroy", "exit")))


def _draw_model(rng: random.Random) -> Model:
    kind = rng.choice(("net", "net", "net", "norm", "branch", "sparse"))
    options: dict[str, Any] = {}
    if kind == "branch":
        options["find_unused_parameters"] = True
    elif kind in ("net", "norm") and rng.random() < 0.25:
        options["static_graph"] = True
    if kind != "sparse" and rng.random() < 0.3:
        options["gradient_as_bucket_view"] = True
    if rng.random() < 0.3:
        options["bucket_cap_mb"] = 1e-5
    return Model(kind, rng.choice(("sgd", "sparse_adam") if kind == "sparse" else ("sgd", "momentum", "adam", "adamw")), options)


def _draw_epoch(rng: random.Random, world_size: int, models: tuple[Model, ...], uneven: bool) -> Epoch:
    static = any(model.options.get("static_graph") for model in models)
    loop = rng.choice(LOOPS)
    counts = tuple(rng.choice((0, 1, 2, 3, 4, 5, 7)) for _ in range(world_size)) if uneven else (rng.randint(1, 6),) * world_size
    # Two forwards before one backward: DDP itself allows it neither with buffers nor with unused parameters.
    steps = [step for step in STEPS if step != "two forwards" or all(model.kind == "net" for model in models)]
    return Epoch(
        loop=loop,
        step="each" if static else rng.choice(steps),
        counts=counts,
        limit=rng.randint(2, 6),
        # With unused parameters, a window that is never synchronised leaves marks that stock DDP takes for gradients later (torch 2.13).
        accumulate=1 if static or any(model.kind == "branch" for model in models) else rng.choice((1, 1, 1, 2, 3)),
        step_at_end=rng.random() < 0.5,
        evaluate_every=rng.choice((0, 0, 2, 3)),
        # Through the wrapper, and on one rank: only without buffers that would be broadcast.
        rank_0_evaluates=rng.random() < 0.5,
        # On uneven inputs a barrier inside a loop whose end cannot be seen is like any other barrier after it.
        barrier_every=rng.choice((0, 0, 0, 1, 2)) if not uneven or loop in SEEN else 0,
        after=tuple(rng.sample(AFTER, rng.randint(0, 2))),
    )


def run(rank: int, world_size: int, mode: str, program: Program) -> Callable[[], dict[str, Any]]:
    """The case that the rank processes run."""
    trained = Interpreter(Context(rank, world_size, mode, program.counts, "sgd"), program).run()
    return lambda: picture(trained)


class Interpreter:
    """Carries out a program on one rank."""

    def __init__(self, ctx: Context, program: Program) -> None:
        self.ctx = ctx
        self.program = program
        torch.manual_seed(program.seed)
        self.models = [DDP(MODELS[model.kind](), **model.options) for model in program.models]
        self.optimizers = [OPTIMIZERS[m.optimizer](ddp.parameters()) for m, ddp in zip(program.models, self.models)]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) for optimizer in self.optimizers]
        self.values: list[Any] = []
        self.step = 0

    def run(self) -> Trained:
        loader = self.ctx.loader()
        for number, epoch in enumerate(self.program.epochs):
            self.ctx.sampler.set_epoch(number)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.epoch, self.step, self.number = epoch, 0, len(loader)
            getattr(self, "loop_" + epoch.loop.replace(" ", "_"))(loader, number)
            for thing in epoch.after:
                getattr(self, "after_" + thing.replace(" ", "_"))(loader)
        return Trained(self.models, self.optimizers, self.values)

    # -- loops

    def loop_for(self, loader: Any, number: int) -> None:
        for x, y in loader:
            self.train(x, y)

    def loop_enumerate(self, loader: Any, number: int) -> None:
        for _i, (x, y) in enumerate(loader):
            self.train(x, y)

    def loop_generator(self, loader: Any, number: int) -> None:
        def logged() -> Iterator[Any]:
            for batch in loader:
                yield batch
            self.values.append("epoch done")

        for x, y in logged():
            self.train(x, y)

    def loop_look_ahead(self, loader: Any, number: int) -> None:
        def one_ahead() -> Iterator[Any]:
            held = None
            for batch in loader:
                if held is not None:
                    yield held
                held = batch
            if held is not None:
                yield held

        for x, y in one_ahead():
            self.train(x, y)

    def loop_window(self, loader: Any, number: int) -> None:
        iterator = iter(loader)
        while True:
            batches = [batch for batch in (next(iterator, None) for _ in range(2)) if batch is not None]
            for x, y in batches:
                self.train(x, y)
            if len(batches) < 2:
                break

    def loop_next(self, loader: Any, number: int) -> None:
        iterator = iter(loader)
        while True:
            try:
                x, y = next(iterator)
            except StopIteration:
                break
            self.train(x, y)

    def loop_limit(self, loader: Any, number: int) -> None:
        for i, (x, y) in enumerate(loader):
            if i == self.epoch.limit:
                break
            self.train(x, y)

    def loop_list(self, loader: Any, number: int) -> None:
        for x, y in self.ctx.lists(number):
            self.train(x, y)

    def loop_restart(self, loader: Any, number: int) -> None:
        if not min(self.epoch.counts):
            return
        iterator = iter(loader)
        for _ in range(2 * self.epoch.limit):
            try:
                x, y = next(iterator)
            except StopIteration:
                iterator = iter(loader)
                x, y = next(iterator)
            self.train(x, y)

    def loop_zip(self, loader: Any, number: int) -> None:
        for (x, y), (u, v) in zip(loader, self.ctx.held_out(self.epoch.limit)):
            self.train(torch.cat([x, u]), torch.cat([y, v]))

    # -- steps

    def train(self, x: torch.Tensor, y: torch.Tensor) -> None:
        epoch = self.epoch
        self.step += 1
        synchronise = self.step % epoch.accumulate == 0 or (epoch.step_at_end and self.step == self.number)
        chosen = list(range(len(self.models)))
        if epoch.step == "alternate":
            chosen = [self.step // epoch.accumulate % len(self.models)]
        with contextlib.ExitStack() as stack:
            if not synchronise:
                for i in chosen:
                    stack.enter_context(self.models[i].no_sync())
            losses = []
            for i in chosen:
                loss = F.mse_loss(self.models[i](x), y)
                if epoch.step == "two forwards":
                    loss = loss + F.mse_loss(self.models[i](x + 1), y)
                if epoch.step != "sum":
                    loss.backward()
                losses.append(loss)
            if epoch.step == "sum":
                torch.stack(losses).sum().backward()
        self.values += [loss.item() for loss in losses]
        if synchronise:
            for i in chosen:
                self.optimizers[i].step()
                self.optimizers[i].zero_grad()
        if epoch.evaluate_every and self.step % epoch.evaluate_every == 0:
            for model, built in zip(self.program.models, self.models):
                if not epoch.rank_0_evaluates:
                    # With buffers that is a collective of all ranks.
                    self.values.append(validate(built if model.kind != "norm" else built.module, self.ctx.held_out(1)))
                elif self.ctx.rank == 0:
                    self.values.append(validate(built if model.kind != "norm" else built.module, self.ctx.held_out(1)))
        if epoch.barrier_every and self.step % epoch.barrier_every == 0:
            dist.barrier()

    # -- after the loop

    def after_barrier(self, loader: Any) -> None:
        dist.barrier()

    def after_evaluate(self, loader: Any) -> None:
        for model in self.models:
            self.values.append(validate(model, self.ctx.held_out()))

    def after_average(self, loader: Any) -> None:
        value = torch.tensor([float(self.step), float(self.ctx.rank)])
        dist.all_reduce(value)
        self.values.append(value)

    def after_rank_0_saves(self, loader: Any) -> None:
        if self.ctx.rank == 0:
            torch.save([model.state_dict() for model in self.models], io.BytesIO())

    def after_schedule(self, loader: Any) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def after_count_batches(self, loader: Any) -> None:
        self.values.append(sum(1 for _ in loader))
