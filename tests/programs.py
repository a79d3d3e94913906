"""Random training programs: drawn from a seed as plain data, and carried out by the ranks.

A program is what a script would be: models with options of DDP, and for each epoch a kind of loop, what one step does with the models,
accumulation, evaluation and collectives inside, and what follows the loop. Later kinds of things go into the tables below and get a branch in
:class:`Interpreter`, or a method in :class:`Collectives`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import random
import types
import zlib
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from compare import difference
from loops import OPTIMIZERS, BranchNet, Context, Net, NormNet, SparseNet, Trained, picture
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

MODELS: dict[str, Callable[[], nn.Module]] = {"net": Net, "norm": NormNet, "branch": BranchNet, "sparse": SparseNet}
#: Loops in which all ranks take the same steps, whatever their numbers of batches: up to a limit that they share, or by asking each other
#: in each step (ESPnet's flag, AllenNLP's, and one that goes on with a used batch). They run today.
AGREEING = ("restart", "flag", "flag by next", "pad")
LOOPS = ("for", "enumerate", "generator", "look ahead", "window", "next", "limit", "list", "zip", "break", "while", *AGREEING)
#: Those whose end ddpfix sees, and of which it knows that only the last batch ends them.
SEEN = ("for", "enumerate", "generator", "zip")
#: Plain ``for`` statements with a way out: it is known what is inside.
WITH_A_WAY_OUT = ("limit", "break", "while")
#: What a step does with several models: a backward for each, one for all, one model per step, or two forwards of each before its backward.
STEPS = ("each", "sum", "alternate", "two forwards")
AFTER = ("barrier", "evaluate", "average", "rank 0 saves", "schedule", "count batches")

#: When in a step a collective is called; the last: only where gradients were synchronised.
WHENS = ("before the forward", "before the backward", "after the step", "after a synchronised step")

# Collectives in which a rank without batches takes part with nothing of its own. "who" is an all_reduce to which each rank contributes its
# number of calls at a place of its own, so that the result tells who took part, with which call.
HONEST = (
    ("all_reduce", "all_reduce", "who", "who", "barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor", "broadcast")
    + ("broadcast_object_list", "all_gather", "all_gather_into_tensor", "gather", "gather_object", "scatter", "scatter_object_list")
)  # fmt: skip
#: What else can follow a loop of unequal length.
AFTERWARDS = (*HONEST, "all_gather_object", "all_to_all", "all_to_all_single", "new_group", "rank 0 first")
#: What else scripts do that ddpfix passes through.
EVERYTHING = (*AFTERWARDS, "all_reduce_coalesced", "monitored_barrier", "some ranks", "to the next rank")

REDUCES = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
ROOTED = ("reduce", "broadcast", "broadcast_object_list", "gather", "gather_object", "scatter", "scatter_object_list")
OBJECTS = ("broadcast_object_list", "gather_object", "scatter_object_list", "all_gather_object")
ASYNCHRONOUS = ("all_reduce", "who", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter", "all_to_all", "all_to_all_single")
FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int8", "uint8")
#: What gloo reduces.
OPERATORS = {
    "SUM": (*FLOATS, *INTEGERS, "complex64"),
    "AVG": FLOATS,
    "PRODUCT": (*FLOATS, *INTEGERS),
    "MIN": (*FLOATS, *INTEGERS),
    "MAX": (*FLOATS, *INTEGERS),
    "BAND": (*INTEGERS, "bool"),
    "BOR": (*INTEGERS, "bool"),
    "BXOR": (*INTEGERS, "bool"),
}


@dataclasses.dataclass(frozen=True)
class Model:
    kind: str
    optimizer: str
    options: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective at a place in the script.

    Arguments:
        place: the name of the function it is called in, which may itself be called from several places.
        group: called on another process group of all ranks.
        waits: ``""``, or with ``async_op=True`` waited for ``"at once"`` or ``"later"`` (in the next step, or behind the loop).
        when, every: for those inside a loop.
    """

    name: str
    place: str
    op: str = "SUM"
    dtype: str = "float32"
    size: int = 1
    root: int = 0
    group: bool = False
    waits: str = ""
    when: str = ""
    every: int = 1

    def __str__(self) -> str:
        what = f"{self.op} " * (self.name in REDUCES) + f"{self.dtype}[{self.size}]" + f" root {self.root}" * (self.name in ROOTED)
        when = f", {self.when}, every {self.every}" if self.when else ""
        return f"<{self.place}: {self.name} {what}{' other group' * self.group}{f' waits {self.waits}' * bool(self.waits)}{when}>"


@dataclasses.dataclass(frozen=True)
class Epoch:
    loop: str
    step: str
    counts: tuple[int, ...]
    limit: int
    stops: tuple[int, ...]
    accumulate: int
    step_at_end: bool
    evaluate_every: int
    rank_0_evaluates: bool
    metric: Collective | None
    during: tuple[Collective, ...]
    after: tuple[str | Collective, ...]

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values.update(metric=str(self.metric), during=[*map(str, self.during)], after=[*map(str, self.after)])
        return f"Epoch({', '.join(f'{name}={value}' for name, value in values.items())})"

    def steps(self, rank: int) -> int:
        """Number of steps of a rank."""
        count = self.counts[rank]
        if self.loop in ("restart", "while"):
            return (2 if self.loop == "restart" else 1) * self.limit if min(self.counts) else 0
        if self.loop in ("flag", "flag by next"):
            return min(self.counts)
        if self.loop == "pad":
            return max(self.counts)
        if self.loop in ("limit", "zip"):
            return min(count, self.limit)
        return min(count, self.stops[rank]) if self.loop == "break" else count

    def synchronises(self, rank: int, step: int) -> bool:
        return step % self.accumulate == 0 or (self.step_at_end and step == self.counts[rank])

    def calls(self, rank: int, collective: Collective) -> int:
        """Number of calls of a rank of a collective in the loop."""
        steps = range(1, self.steps(rank) + 1)
        if collective is self.metric:
            return sum(step % self.evaluate_every == 0 for step in steps) if self.evaluate_every else 0
        synchronised = collective.when == WHENS[-1]
        return sum(step % collective.every == 0 and (self.synchronises(rank, step) or not synchronised) for step in steps)


@dataclasses.dataclass(frozen=True)
class Program:
    seed: int
    world_size: int
    uneven: bool
    models: tuple[Model, ...]
    epochs: tuple[Epoch, ...]
    end: str

    @property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        return tuple(epoch.counts for epoch in self.epochs)

    def __str__(self) -> str:
        lines = [f"program {self.seed}{' uneven' * self.uneven} on {self.world_size} ranks, ends by {self.end}"]
        return "\n    ".join([*lines, *map(str, self.models), *map(str, self.epochs)])


# ---------------------------------------------------------------------------------------------------------------------------------------
# Drawing


def draw(seed: int, uneven: bool) -> Program:
    """Draws a program.

    Arguments:
        seed: the same seed gives the same program. Of five seeds, three are for 2 ranks, one for 3 and one for 4.
        uneven: ranks have different numbers of batches, some none at all. Otherwise the program runs today: they have the same numbers, or
            agree in each step whether to go on.
    """
    rng = random.Random(f"{seed} {'uneven' if uneven else 'even'}")
    world_size = (2, 2, 2, 3, 4)[seed % 5]
    models = tuple(_draw_model(rng) for _ in range(rng.choice((1, 1, 1, 2, 3))))
    # As in a script: the loop over the epochs has one body. Or each epoch has its own.
    body = rng.random() if rng.random() < 0.5 else None
    loops = LOOPS if rng.random() < 0.7 else (rng.choice(LOOPS),)
    epochs = [_draw_epoch(rng, rng.choice(loops), body, number, world_size, models, uneven) for number in range(rng.randint(2, 4))]
    if uneven and len(models) > 1:
        # Ranks that have come apart may be in different epochs, where a backward of one model cannot pair with that of another.
        epochs = [dataclasses.replace(epoch, step=epochs[0].step, accumulate=epochs[0].accumulate) for epoch in epochs]
    if uneven:
        epochs = _decidable(rng, epochs, world_size, models)
    return Program(seed, world_size, uneven, models, tuple(epochs), rng.choice(("destroy", "destroy", "exit")))


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


def _draw_epoch(
    rng: random.Random, loop: str, body_seed: float | None, number: int, world_size: int, models: tuple[Model, ...], uneven: bool
) -> Epoch:
    """Draws an epoch.

    Arguments:
        body_seed: the collectives are drawn from it, if they are those of other epochs, too.
    """
    body = random.Random(rng.random() if body_seed is None else body_seed)
    prefix = f"epoch {number} " if body_seed is None else ""
    static = any(model.options.get("static_graph") for model in models)
    counts = tuple(rng.choice((0, 1, 2, 3, 4, 5, 7)) for _ in range(world_size))
    if not uneven and (loop not in ("flag", "flag by next", "pad") or rng.random() < 0.2):
        counts = (rng.randint(1, 6),) * world_size
    limit = rng.randint(2, 6)
    # Two forwards before one backward: DDP itself allows it neither with buffers nor with unused parameters.
    steps = [step for step in STEPS if step != "two forwards" or all(model.kind == "net" for model in models)]
    evaluate_every, rank_0_evaluates = rng.choice((0, 0, 2, 3)), rng.random() < 0.5
    inside = HONEST if uneven and (body_seed is not None or loop not in AGREEING) else EVERYTHING
    places = [f"{prefix}loop {i}" for i in range(body.choice((0, 0, 1, 1, 2, 3)))]
    during = tuple(_draw_collective(body, inside, world_size, place, inside=True) for place in places)
    metric: Collective | None = _draw_collective(body, ("all_reduce", "who", "reduce", "barrier"), world_size, f"{prefix}metric")
    if body.random() < 0.4 or not evaluate_every or rank_0_evaluates:
        metric = None
    after: list[str | Collective] = list(body.sample(AFTER, body.randint(0, 2)))
    for i in range(body.choice((0, 1, 1, 2))):
        one = _draw_collective(body, AFTERWARDS if uneven else EVERYTHING, world_size, f"{prefix}after {i}")
        if during and body.random() < 0.5:
            # One that fits those in the loop, at its own place; or the very function that is called there.
            like = body.choice(during)
            one = dataclasses.replace(like, place=body.choice((one.place, like.place)), when="", every=1)
        after.insert(body.randint(0, len(after)), one)
    return Epoch(
        loop=loop,
        step="each" if static else rng.choice(steps),
        counts=counts,
        limit=limit,
        stops=tuple(rng.randint(1, 5) for _ in range(world_size)) if uneven else (limit,) * world_size,
        # With unused parameters, a window that is never synchronised leaves marks that stock DDP takes for gradients later (torch 2.13).
        accumulate=1 if static or any(model.kind == "branch" for model in models) else rng.choice((1, 1, 1, 2, 3)),
        # Ranks with unequal counts that take equal numbers of steps must synchronise in the same ones.
        step_at_end=rng.random() < 0.5 and (loop not in (*AGREEING, "while") or len(set(counts)) == 1),
        evaluate_every=evaluate_every,
        rank_0_evaluates=rank_0_evaluates,
        metric=metric,
        during=during,
        after=tuple(after),
    )


def _draw_collective(rng: random.Random, names: Sequence[str], world_size: int, place: str, inside: bool = False) -> Collective:
    name = rng.choice(names)
    op = rng.choice(("SUM", "SUM", *OPERATORS)) if name in REDUCES else "SUM"
    size = rng.choice((1, 1, 1, 2, 5))
    dtype = rng.choice(("float32", *OPERATORS[op]))
    if name in ("all_gather", "all_gather_into_tensor"):
        size = rng.choice((0, 1, 1))
    if name == "who":
        size, dtype = world_size, "float64"
    if op.startswith("B") and dtype not in OPERATORS[op]:
        dtype = "int64"
    if dtype == "complex64" and name == "gather":
        dtype = "float32"  # gloo gathers none
    return Collective(
        name=name,
        place=place,
        op=op,
        dtype=dtype,
        size=size,
        root=rng.randrange(world_size),
        group=rng.random() < 0.2 and name not in ("new_group", "some ranks", "rank 0 first"),
        waits=rng.choice(("", "", "at once", "later")) if name in ASYNCHRONOUS else "",
        when=rng.choice(WHENS) if inside else "",
        every=rng.choice((1, 1, 1, 2)) if inside else 1,
    )


def _decidable(rng: random.Random, epochs: list[Epoch], world_size: int, models: Sequence[Model]) -> list[Epoch]:
    """Leaves of uneven epochs what has one honest outcome.

    Where a rank has run out of batches and ddpfix cannot see it, that rank is known to be ahead once the others train a step, and by having
    called from its own loop what they call from theirs.
    """
    found: list[Epoch] = []
    # Two models must be trained in the same order on all ranks, in every epoch: so the ranks must be in the same one.
    alternate = len(models) > 1 and epochs[0].step == "alternate"
    apart = not alternate and not any(epoch.during or epoch.metric for epoch in epochs)
    for epoch in epochs:
        if epoch.loop in AGREEING:
            found.append(epoch)
            continue
        blind = epoch.loop not in SEEN
        during = list(epoch.during)
        if blind:
            # Before a step, a flag that tells who has run out looks the same, and pairs with what follows the loop, as it does today.
            during = [dataclasses.replace(one, when=WHENS[-1]) for one in during]
        metric = epoch.metric if not blind or epoch.accumulate == 1 else None
        if (during or metric or alternate) and epoch.accumulate > 1:
            # A last step out of turn would meet steps of the others with another number.
            epoch = dataclasses.replace(epoch, step_at_end=False)
        if during and blind and epoch.loop not in WITH_A_WAY_OUT and rng.random() < 0.8:
            counts = tuple(max(count, 2 * epoch.accumulate + 2) for count in epoch.counts)
            epoch = dataclasses.replace(epoch, counts=counts)
        epoch = dataclasses.replace(epoch, metric=metric, during=tuple(during))
        # There, a rank must have called a place itself to know it when others call it again.
        needed = 1 if blind and epoch.loop not in WITH_A_WAY_OUT else 0
        during = []
        for one in epoch.during:
            if min(epoch.calls(rank, one) for rank in range(world_size)) >= needed:
                during.append(_honest(one, epoch, [epoch.calls(rank, one) for rank in range(world_size)], found))
        if metric is not None and min(epoch.calls(rank, metric) for rank in range(world_size)) < needed:
            metric = None
        after = epoch.after
        if blind and (not apart and not any(isinstance(thing, Collective) for thing in after) or "schedule" in after):
            # Without a meeting ranks go into the next epoch while others are in this one, and call what does not fit; and a scheduler takes its
            # step on ranks that have run out, and once more when they have got the state of the others.
            after = (_draw_collective(rng, ("all_reduce", "who", "all_gather"), world_size, "meets"), *after)
        found.append(dataclasses.replace(epoch, metric=metric, during=tuple(during), after=after))
    return found


def _honest(one: Collective, epoch: Epoch, calls: list[int], before: list[Epoch]) -> Collective:
    """The same collective, from or to a rank with which it is honest."""
    if epoch.loop == "while" and one.name in ROOTED:
        return dataclasses.replace(one, name="all_reduce")  # each rank is the one without batches at some time
    first, last = calls.index(min(calls)), calls.index(max(calls))
    if one.name.startswith("broadcast") and not calls[one.root]:
        sent = any(other.loop == epoch.loop and one in other.during and other.calls(one.root, one) for other in before)
        return one if sent else dataclasses.replace(one, root=last)
    if one.name.startswith("scatter"):
        return dataclasses.replace(one, root=last)
    if one.name == "gather_object" or one.name == "gather" and one.size > 1:
        return dataclasses.replace(one, root=first)
    return one


# ---------------------------------------------------------------------------------------------------------------------------------------
# Carrying out


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
        self.collectives = Collectives(ctx.rank, program)
        self.values: list[Any] = []
        self.step = 0

    def run(self) -> Trained:
        loader = self.ctx.loader()
        for number, epoch in enumerate(self.program.epochs):
            self.ctx.sampler.set_epoch(number)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.epoch, self.step, self.number = epoch, 0, number
            getattr(self, "loop_" + epoch.loop.replace(" ", "_"))(loader, number)
            self.collectives.wait()
            for i, thing in enumerate(epoch.after):
                if isinstance(thing, Collective):
                    self.collectives.call(thing, (number, "after", i))
                else:
                    getattr(self, "after_" + thing.replace(" ", "_"))(loader)
            self.collectives.wait()
        return Trained(self.models, self.optimizers, self.values, {"calls": self.collectives.calls})

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

    def loop_zip(self, loader: Any, number: int) -> None:
        for (x, y), (u, v) in zip(loader, self.ctx.held_out(self.epoch.limit)):
            self.train(torch.cat([x, u]), torch.cat([y, v]))

    def loop_break(self, loader: Any, number: int) -> None:
        for x, y in loader:
            self.train(x, y)
            if self.step == self.epoch.stops[self.ctx.rank]:
                break

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

    def loop_while(self, loader: Any, number: int) -> None:
        while self.step < self.epoch.limit and min(self.epoch.counts):
            for x, y in loader:
                self.train(x, y)
                if self.step == self.epoch.limit:
                    break

    def loop_flag(self, loader: Any, number: int) -> None:
        flag = torch.zeros(1)
        for x, y in loader:
            dist.all_reduce(flag)
            if flag > 0:
                break
            self.train(x, y)
        else:
            flag.fill_(1.0)
            dist.all_reduce(flag)
        self.values.append(flag)

    def loop_flag_by_next(self, loader: Any, number: int) -> None:
        iterator = iter(loader)
        while True:
            batch = next(iterator, None)
            flag = torch.tensor(int(batch is None))
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            self.values.append(flag)
            if batch is None or flag:
                break
            self.train(*batch)

    def loop_pad(self, loader: Any, number: int) -> None:
        iterator = iter(loader)
        batch = [torch.zeros(2, 4), torch.zeros(2, 2)]
        while True:
            following = next(iterator, None)
            done = torch.tensor(int(following is None))
            dist.all_reduce(done)
            self.values.append(done)
            if done == self.ctx.world_size:
                break
            batch = batch if following is None else following
            self.train(*batch)

    # -- steps

    def train(self, x: torch.Tensor, y: torch.Tensor) -> None:
        epoch = self.epoch
        self.step += 1
        self.collectives.wait()
        self.call_those(WHENS[0])
        synchronise = epoch.synchronises(self.ctx.rank, self.step)
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
                if i == chosen[0]:
                    self.call_those(WHENS[1])
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
            for number, (model, built) in enumerate(zip(self.program.models, self.models)):
                if not epoch.rank_0_evaluates:
                    self.evaluate(built, 1, (self.number, "metric", self.step, number))
                elif self.ctx.rank == 0:
                    # Through the wrapper, and on one rank: only without buffers that would be broadcast.
                    self.evaluate(built if model.kind != "norm" else built.module, 1)
        self.call_those(WHENS[2])
        if synchronise:
            self.call_those(WHENS[3])

    def call_those(self, when: str) -> None:
        for i, one in enumerate(self.epoch.during):
            if one.when == when and self.step % one.every == 0:
                self.collectives.call(one, (self.number, "loop", self.step, i))

    @torch.no_grad()
    def evaluate(self, model: nn.Module, number: int, key: tuple[Any, ...] = ()) -> None:
        model.eval()
        total = 0.0
        for x, y in self.ctx.held_out(number):
            total += F.mse_loss(model(x), y).item()
            if key and self.epoch.metric is not None:
                self.collectives.call(self.epoch.metric, key)
        model.train()
        self.values.append(total)

    # -- after the loop

    def after_barrier(self, loader: Any) -> None:
        dist.barrier()

    def after_evaluate(self, loader: Any) -> None:
        for number, model in enumerate(self.models):
            self.evaluate(model, 1, (self.number, "after metric", number))

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


class Call(NamedTuple):
    """A call of a collective on one rank.

    Arguments:
        key: epoch, ``"loop"``, ``"metric"`` or ``"after"``, and what else makes it the same call on all ranks.
        number: of all calls of this rank.
        mine: what this rank contributed.
        result: what it got; ``None`` where that means nothing.
    """

    key: tuple[Any, ...]
    collective: Collective
    number: int
    mine: Any
    result: Any


class Collectives:
    """Calls collectives for one rank, and keeps what they have returned."""

    def __init__(self, rank: int, program: Program) -> None:
        self.rank, self.world_size = rank, program.world_size
        self.program = program
        self.others = dist.new_group(list(range(self.world_size)))
        self.some = dist.new_group([0, self.world_size - 1])
        self.calls: list[Call] = []
        self._pending: list[Callable[[], None]] = []

    def call(self, one: Collective, key: tuple[Any, ...]) -> None:
        call = Call(key, one, len(self.calls), self._contribution(one), None)
        self.calls.append(call)
        work, result = _place(one.place)(getattr(self, one.name.replace(" ", "_")), one, call.mine)

        def wait() -> None:
            if one.waits:
                work.wait()
            self.calls[call.number] = call._replace(result=result())

        if one.waits == "later":
            self._pending.append(wait)
        else:
            wait()

    def wait(self) -> None:
        """Wait for what was begun with ``async_op=True``."""
        for wait in self._pending:
            wait()
        self._pending.clear()

    def _contribution(self, one: Collective) -> Any:
        number = len(self.calls)
        if one.name in OBJECTS:
            objects = [{"from": self.rank, "call": number, "for": rank} for rank in range(self.world_size)]
            return objects if one.name == "scatter_object_list" else objects[0]
        if one.name == "who":
            mine = torch.zeros(self.world_size, dtype=torch.float64)
            mine[self.rank] = number + 1
            return mine
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.program.seed} {self.rank} {number}".encode()))
        rows = one.name.startswith(("scatter", "reduce_scatter", "all_to_all"))
        shape = (self.world_size, one.size) if rows else (one.size,)
        dtype = getattr(torch, one.dtype)
        if dtype.is_floating_point and not self.program.uneven:
            return torch.randn(shape, generator=generator).to(dtype)
        # Exact, in whatever order they are reduced.
        return torch.randint(0, 4, shape, generator=generator).to(dtype)

    def _options(self, one: Collective) -> dict[str, Any]:
        options: dict[str, Any] = {"group": self.others} if one.group else {}
        if one.waits:
            options["async_op"] = True
        if one.name in REDUCES:
            options["op"] = getattr(dist.ReduceOp, one.op)
        return options

    def _empty(self, one: Collective) -> list[torch.Tensor]:
        return [torch.zeros(one.size, dtype=getattr(torch, one.dtype)) for _ in range(self.world_size)]

    # -- each returns the work and what gives the result once that is done

    def barrier(self, one: Collective, mine: Any) -> Any:
        return dist.barrier(**self._options(one)), lambda: None

    def all_reduce(self, one: Collective, mine: torch.Tensor) -> Any:
        value = mine.clone()
        return dist.all_reduce(value, **self._options(one)), lambda: value

    who = all_reduce

    def reduce(self, one: Collective, mine: torch.Tensor) -> Any:
        value = mine.clone()
        return dist.reduce(value, one.root, **self._options(one)), lambda: value if self.rank == one.root else None

    def reduce_scatter(self, one: Collective, mine: torch.Tensor) -> Any:
        value = torch.zeros_like(mine[0])
        return dist.reduce_scatter(value, [row.clone() for row in mine], **self._options(one)), lambda: value

    def reduce_scatter_tensor(self, one: Collective, mine: torch.Tensor) -> Any:
        value = torch.zeros_like(mine[0])
        return dist.reduce_scatter_tensor(value, mine.clone().flatten(), **self._options(one)), lambda: value

    def broadcast(self, one: Collective, mine: torch.Tensor) -> Any:
        value = mine.clone()
        return dist.broadcast(value, one.root, **self._options(one)), lambda: value

    def broadcast_object_list(self, one: Collective, mine: Any) -> Any:
        objects = [mine]
        return dist.broadcast_object_list(objects, one.root, **self._options(one)), lambda: objects

    def all_gather(self, one: Collective, mine: torch.Tensor) -> Any:
        values = self._empty(one)
        return dist.all_gather(values, mine.clone(), **self._options(one)), lambda: torch.stack(values)

    def all_gather_into_tensor(self, one: Collective, mine: torch.Tensor) -> Any:
        values = torch.cat(self._empty(one))
        return dist.all_gather_into_tensor(values, mine.clone(), **self._options(one)), lambda: values.reshape(self.world_size, one.size)

    def all_gather_object(self, one: Collective, mine: Any) -> Any:
        objects: list[Any] = [None] * self.world_size
        return dist.all_gather_object(objects, mine, **self._options(one)), lambda: objects

    def gather(self, one: Collective, mine: torch.Tensor) -> Any:
        values = self._empty(one) if self.rank == one.root else None
        work = dist.gather(mine.clone(), values, one.root, **self._options(one))
        return work, lambda: torch.stack(values) if values is not None else None

    def gather_object(self, one: Collective, mine: Any) -> Any:
        objects: list[Any] | None = [None] * self.world_size if self.rank == one.root else None
        return dist.gather_object(mine, objects, one.root, **self._options(one)), lambda: objects

    def scatter(self, one: Collective, mine: torch.Tensor) -> Any:
        value = torch.zeros_like(mine[0])
        rows = [row.clone() for row in mine] if self.rank == one.root else None
        return dist.scatter(value, rows, one.root, **self._options(one)), lambda: value

    def scatter_object_list(self, one: Collective, mine: Any) -> Any:
        objects: list[Any] = [None]
        dist.scatter_object_list(objects, mine if self.rank == one.root else None, one.root, **self._options(one))
        return None, lambda: objects

    def all_to_all(self, one: Collective, mine: torch.Tensor) -> Any:
        values = self._empty(one)
        return dist.all_to_all(values, [row.clone() for row in mine], **self._options(one)), lambda: torch.stack(values)

    def all_to_all_single(self, one: Collective, mine: torch.Tensor) -> Any:
        values = torch.zeros_like(mine).flatten()
        return dist.all_to_all_single(values, mine.clone().flatten(), **self._options(one)), lambda: values.reshape(self.world_size, one.size)

    def new_group(self, one: Collective, mine: torch.Tensor) -> Any:
        value = mine.clone()
        return dist.all_reduce(value, group=dist.new_group(list(range(self.world_size)))), lambda: value

    def rank_0_first(self, one: Collective, mine: Any) -> Any:
        if self.rank > 0:
            dist.barrier()
        if self.rank == 0:
            dist.barrier()
        return None, lambda: None

    def all_reduce_coalesced(self, one: Collective, mine: torch.Tensor) -> Any:
        values = [mine.clone(), mine + 1]
        return dist.all_reduce_coalesced(values), lambda: torch.cat(values)

    def monitored_barrier(self, one: Collective, mine: Any) -> Any:
        return dist.monitored_barrier(), lambda: None

    def some_ranks(self, one: Collective, mine: torch.Tensor) -> Any:
        value = mine.clone()
        if self.rank in (0, self.world_size - 1):
            dist.all_reduce(value, group=self.some)
        return None, lambda: value

    def to_the_next_rank(self, one: Collective, mine: torch.Tensor) -> Any:
        value = torch.zeros_like(mine)
        work = dist.isend(mine.clone(), (self.rank + 1) % self.world_size)
        dist.recv(value, (self.rank - 1) % self.world_size)
        assert work is not None
        work.wait()
        return None, lambda: value


@functools.lru_cache(maxsize=None)
def _place(name: str) -> Callable[..., Any]:
    """A function of that name, for the frames of a program to differ as those of a script with different lines do."""

    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    return types.FunctionType(call.__code__.replace(co_name=name.replace(" ", "_")), call.__globals__, name)


# ---------------------------------------------------------------------------------------------------------------------------------------
# What the calls of all ranks must have returned


def wrong_value(program: Program, calls: Sequence[Sequence[Call]]) -> str | None:
    """Says which collective of an uneven program returned what it should not; ``None`` if all are right.

    Arguments:
        calls: those of each rank.
    """
    together: dict[tuple[Any, ...], dict[int, Call]] = {}
    for rank, its in enumerate(calls):
        for call in its:
            together.setdefault(call.key, {})[rank] = call
    for key, there in together.items():
        one = next(iter(there.values())).collective
        for rank, call in there.items():
            number, inside = key[0], key[1] in ("loop", "metric")
            if inside and program.epochs[number].loop == "while":
                # The ranks take as many steps, but not the same ones.
                found = _inconsistent(call, calls) if one.name == "who" else None
            elif not inside and len(there) < program.world_size:
                found = "not all ranks came"
            else:
                last = None
                if one.root not in there:
                    last = _last_sent(program, one, key, calls[one.root])
                found = difference(_expected(one, rank, program.world_size, there, last), call.result, close=one.op == "AVG")
            if found is not None:
                return f"rank {rank} at {key}, {one}: {found}; contributed were { {r: c.mine for r, c in there.items()} }"
    return None


def _inconsistent(call: Call, calls: Sequence[Sequence[Call]]) -> str | None:
    """What is wrong with a result that tells who took part."""
    for rank, number in enumerate(int(value) for value in call.result):
        if number:
            other = calls[rank][number - 1]
            if other.collective != call.collective or not torch.equal(other.result, call.result):
                return f"got {call.result}, but rank {rank} got {other.result} at {other.key}"
    return None


def _last_sent(program: Program, one: Collective, key: tuple[Any, ...], calls: Sequence[Call]) -> Any:
    """What a rank that has run out has last sent from the same place: of the same loop, maybe in an earlier epoch."""
    loop = program.epochs[key[0]].loop
    sent = [c.mine for c in calls if c.collective == one and c.key[1] == key[1] and c.key < key and program.epochs[c.key[0]].loop == loop]
    return sent[-1] if sent else None


_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def _expected(one: Collective, rank: int, world_size: int, there: dict[int, Call], last: Any) -> Any:
    """What a rank must get, when those ``there`` take part with something of their own.

    Arguments:
        last: what the root has last sent, if it is not there.
    """
    mine = {r: call.mine for r, call in there.items()}
    root = mine.get(one.root, last)

    def reduced(values: Iterable[torch.Tensor]) -> torch.Tensor:
        total = functools.reduce(_REDUCTIONS[one.op], values)
        return total / world_size if one.op == "AVG" else total

    def gathered() -> torch.Tensor:
        return torch.stack([mine[r] if r in mine else torch.zeros_like(mine[rank]) for r in range(world_size)])

    if one.name in ("all_reduce", "who", "new_group"):
        return reduced(mine.values())
    if one.name in ("reduce_scatter", "reduce_scatter_tensor"):
        return reduced(value[rank] for value in mine.values())
    if one.name in ("all_gather", "all_gather_into_tensor"):
        return gathered()
    if one.name in ("all_to_all", "all_to_all_single"):
        return torch.stack([mine[r][rank] for r in range(world_size)])
    if one.name == "all_gather_object":
        return [mine[r] for r in range(world_size)]
    if one.name == "broadcast":
        return root
    if one.name == "broadcast_object_list":
        return [root]
    if one.name == "scatter":
        return root[rank]
    if one.name == "scatter_object_list":
        return [root[rank]]
    if one.name == "all_reduce_coalesced":
        return torch.cat([reduced(mine.values()), reduced(value + 1 for value in mine.values())])
    if one.name == "some ranks":
        return reduced([mine[0], mine[world_size - 1]]) if rank in (0, world_size - 1) else mine[rank]
    if one.name == "to the next rank":
        return mine[(rank - 1) % world_size]
    if one.root != rank or one.name not in ("reduce", "gather", "gather_object"):
        return None
    if one.name == "reduce":
        return reduced(mine.values())
    return gathered() if one.name == "gather" else [mine[r] for r in range(world_size)]
