"""Tiny training programs in the training frameworks that people use, each as its own documentation would write it.

Nothing in a program knows of ddpfix, but for ``ctx.counts``: how many batches each rank has in each epoch. A program returns what it has when it
is through. Any of the packages may be missing: a program names those that it needs.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import glob
import importlib
import importlib.util
import io
import os
import tarfile
from typing import Any, Callable, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from communicating import Summed
from loops import BATCH, Net, NormNet, Shard, ShardSampler, sample
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, IterableDataset

Counts = Sequence[Sequence[int]]  # for each epoch, the number of batches of each rank

#: What becomes of the uneven program: REFUSED is one error of ddpfix on all ranks; FAILS is any error, but no hang.
FINISHES, HANGS, REFUSED, FAILS = "finishes", "hangs", "refused", "fails"

PACKAGES = ("pytorch_lightning", "accelerate", "transformers.trainer", "torchmetrics", "ignite.engine", "webdataset")


def import_packages() -> None:
    """Imports what there is of them: once in a server of rank processes, and not in each rank of each case."""
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001 (missing or broken: its own cases say so)
            pass


@dataclasses.dataclass(frozen=True)
class Program:
    """A program and what is expected of it.

    Arguments:
        packages: those that must be there, separated by blanks.
        stock: what becomes of it on uneven inputs without ddpfix.
        ours: what becomes of it with ddpfix.
        as_stock: it finishes on uneven inputs today, so that ddpfix must change nothing, to the bit.
        even, uneven: batches for each epoch of ranks 0 and 1.
        steps: the batches that are trained on if the inputs are uneven, where these are not all.
    """

    function: Callable[["Context"], "Trained"]
    packages: str
    stock: str = HANGS
    ours: str = FINISHES
    as_stock: bool = False
    even: Counts = ((4, 4), (4, 4))
    uneven: Counts = ((3, 5), (5, 2))
    steps: Counts | None = None

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def missing(self) -> list[str]:
        return [name for name in self.packages.split() if importlib.util.find_spec(name) is None]


PROGRAMS: dict[str, Program] = {}


def program(packages: str, **expected: Any) -> Callable[[Callable[["Context"], "Trained"]], Callable[["Context"], "Trained"]]:
    def enter(function: Callable[["Context"], "Trained"]) -> Callable[["Context"], "Trained"]:
        PROGRAMS[function.__name__] = Program(function, packages, **expected)
        return function

    return enter


@dataclasses.dataclass
class Context:
    rank: int
    world_size: int
    counts: Counts
    folder: str

    @property
    def own_counts(self) -> list[int]:
        return [epoch[self.rank] for epoch in self.counts]

    def stream(self) -> "Stream":
        return Stream(self.rank, self.own_counts)

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self.stream(), batch_size=BATCH)

    def sized_loader(self) -> DataLoader[Any]:
        return DataLoader(Shard(self.rank), batch_size=BATCH, sampler=ShardSampler(self.own_counts))


@dataclasses.dataclass
class Trained:
    """What a program has when it is through.

    Arguments:
        steps: the batches that this rank trained on, for each epoch.
        same: values that all ranks must have got alike.
        own: values that may differ from rank to rank.
        saved: the model in the last checkpoint.
    """

    model: nn.Module
    optimizer: Any
    steps: Any
    same: Any = None
    own: Any = None
    saved: Any = None


def run(rank: int, world_size: int, mode: str, name: str, counts: Counts, folder: str) -> Callable[[], dict[str, Any]]:
    """The case that the rank processes run."""
    trained = PROGRAMS[name].function(Context(rank, world_size, counts, folder))
    return lambda: copy.deepcopy(
        {
            "model": dict(trained.model.state_dict()),
            "optimizer": trained.optimizer.state_dict(),
            "steps": trained.steps,
            "same": trained.same,
            "own": trained.own,
            "saved": None if trained.saved is None else dict(trained.saved),
        }
    )


class Stream(IterableDataset):  # type: ignore[type-arg]
    """The samples of one rank; each pass over it is the next epoch. It does not know its length."""

    def __init__(self, rank: int, counts: Sequence[int]) -> None:
        self.rank = rank
        self.counts = counts
        self.passes = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        epoch = self.passes
        self.passes += 1
        for index in range(BATCH * self.counts[epoch % len(self.counts)]):
            yield sample(self.rank, epoch, index)


class Samples(Dataset):  # type: ignore[type-arg]
    """As many samples, the same on all ranks."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index >= self.length:
            raise IndexError(index)
        return sample(7, 0, index)


class CentredNet(Net):
    """Its ranks need each other in forward and backward, as with SyncBatchNorm; all end their epochs with the shortest."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.training:
            number = Summed.apply(torch.tensor([float(len(x))]))
            hidden = hidden - Summed.apply(hidden.sum(0)) / number
        return self.second(torch.relu(hidden))  # type: ignore[no-any-return]


SHORTEST = ((3, 3), (2, 2))


# ---------------------------------------------------------------------------------------------------------------------------------------
# PyTorch Lightning


def lightning(
    ctx: Context, net: type[nn.Module] = Net, sized: bool = False, log: bool = False, validate: bool = False, manual: bool = False, **options: Any
) -> Trained:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.automatic_optimization = not manual
            self.steps: list[int] = []
            self.epochs: list[dict[str, torch.Tensor]] = []

        def on_train_epoch_start(self) -> None:
            self.steps.append(0)

        def training_step(self, data: Any, batch_idx: int) -> Any:
            x, y = data
            self.steps[-1] += 1
            loss = F.mse_loss(self.net(x), y)
            if log:
                self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
                self.log("largest", y.max(), on_step=True, on_epoch=False, sync_dist=True, reduce_fx="max")
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, data: Any, batch_idx: int) -> None:
            x, y = data
            self.log("val_loss", F.mse_loss(self.net(x), y), sync_dist=True)

        def on_train_epoch_end(self) -> None:
            self.epochs.append({name: value.clone() for name, value in self.trainer.callback_metrics.items()})

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.net.parameters(), lr=0.05)

    torch.manual_seed(0)
    module = Module()
    trainer = pl.Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=ctx.world_size,
        max_epochs=len(ctx.counts),
        default_root_dir=ctx.folder,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, **options},
    )
    evaluation = DataLoader(Samples(2 * BATCH), batch_size=BATCH) if validate else None
    trainer.fit(module, ctx.sized_loader() if sized else ctx.loader(), evaluation)
    callbacks = {type(callback).__name__: callback.state_dict() for callback in trainer.callbacks}
    saved = None
    if trainer.checkpoint_callback is not None:
        dist.barrier()
        newest = max((os.path.getmtime(path), path) for path in glob.glob(os.path.join(ctx.folder, "*.ckpt")))[1]
        content = torch.load(newest, weights_only=False)["state_dict"]
        saved = {name[len("net.") :]: value for name, value in content.items()}
        for state in callbacks.values():
            for key in [key for key in state if "path" in key or key in ("dirpath", "best_k_models")]:
                del state[key]
    # Other values belong to the rank.
    epochs = [{name: value for name, value in epoch.items() if name in ("loss_epoch", "val_loss")} for epoch in module.epochs]
    own = {"epochs": module.epochs, "step": trainer.global_step}
    return Trained(module.net, trainer.optimizers[0], module.steps, [epochs, callbacks], own, saved)


@program("pytorch_lightning")
def lightning_stream(ctx: Context) -> Trained:
    return lightning(ctx)


@program("pytorch_lightning", uneven=((0, 3), (2, 4)))
def lightning_without_batches(ctx: Context) -> Trained:
    return lightning(ctx)


@program("pytorch_lightning", uneven=((3, 5), (3, 5)))
def lightning_sized(ctx: Context) -> Trained:
    return lightning(ctx, sized=True)


@program("pytorch_lightning", steps=((3, 5), (3, 2)))
def lightning_sized_changing(ctx: Context) -> Trained:
    # It keeps the length of the first epoch, so that one rank stops early and the other one runs out later.
    return lightning(ctx, sized=True)


@program("pytorch_lightning")
def lightning_norm(ctx: Context) -> Trained:
    return lightning(ctx, net=NormNet, validate=True)


@program("pytorch_lightning", steps=SHORTEST)
def lightning_communicating(ctx: Context) -> Trained:
    return lightning(ctx, net=CentredNet, log=True, validate=True)


@program("pytorch_lightning", uneven=((3, 5), (3, 5)), steps=((3, 5), (3, 1)))
def lightning_communicating_sized(ctx: Context) -> Trained:
    # Whoever counts the batches of a loader does not see that it ends sooner.
    return lightning(ctx, net=CentredNet, sized=True)


@program("pytorch_lightning")
def lightning_logged(ctx: Context) -> Trained:
    return lightning(ctx, log=True)


@program("pytorch_lightning")
def lightning_accumulated(ctx: Context) -> Trained:
    return lightning(ctx, accumulate_grad_batches=2)


@program("pytorch_lightning", ours=FAILS)
def lightning_manual(ctx: Context) -> Trained:
    # Lightning prepares the reducer itself, and runs the backward inside of DDP's forward, where ddpfix does not see that it is synchronised.
    return lightning(ctx, manual=True)


@program("pytorch_lightning")
def lightning_validated(ctx: Context) -> Trained:
    from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

    callbacks = [ModelCheckpoint(ctx.folder, monitor="val_loss", save_last=True), EarlyStopping("val_loss", patience=5)]
    return lightning(ctx, validate=True, callbacks=callbacks, enable_checkpointing=True)


@program("pytorch_lightning", uneven=((3, 5), (3, 5)))
def lightning_everything(ctx: Context) -> Trained:
    from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint

    callbacks = [ModelCheckpoint(ctx.folder, monitor="loss_epoch", save_top_k=-1), EarlyStopping("val_loss", patience=5)]
    return lightning(
        ctx, sized=True, log=True, validate=True, callbacks=callbacks, enable_checkpointing=True, accumulate_grad_batches=2, gradient_clip_val=1.0
    )


# ---------------------------------------------------------------------------------------------------------------------------------------
# Accelerate


class Doubled(Stream):
    """A stream of which Accelerate gives every rank one half: the rank's own batches, each once for every rank."""

    def __init__(self, rank: int, counts: Sequence[int], world_size: int) -> None:
        super().__init__(rank, counts)
        self.world_size = world_size

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        samples = list(super().__iter__())
        for start in range(0, len(samples), BATCH):
            yield from samples[start : start + BATCH] * self.world_size


def accelerate(
    ctx: Context, kind: str = "stream", accumulate: int = 1, gather: str = "", by_hand: bool = False, net: type[nn.Module] = Net
) -> Trained:
    from accelerate import Accelerator, DataLoaderConfiguration

    config = DataLoaderConfiguration(even_batches=False, dispatch_batches=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, dataloader_config=config)
    torch.manual_seed(0)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    if kind == "stream":
        loader = DataLoader(Doubled(ctx.rank, ctx.own_counts, ctx.world_size), batch_size=BATCH)
    else:
        # One data set for all ranks; the batches that are left over go to the first ranks.
        loader = DataLoader(Samples(BATCH * sum(ctx.counts[0])), batch_size=BATCH)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    evaluation = accelerator.prepare(DataLoader(Samples(4 * BATCH), batch_size=BATCH))
    if by_hand:
        # On the CPU, join_uneven_inputs() does nothing but warn; torch's join() needs no GPU.
        Accelerator.multi_device = property(lambda self: True)
    steps, means, gathered = [], [], []
    for _ in ctx.counts:
        model.train()
        steps.append(0)
        total = torch.zeros(())
        with accelerator.join_uneven_inputs([model]) if by_hand else contextlib.nullcontext():
            for x, y in loader:
                with accelerator.accumulate(model):
                    output = model(x)
                    loss = F.mse_loss(output, y)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                steps[-1] += 1
                total += loss.detach()
                if gather:
                    gathered.append(accelerator.gather_for_metrics({"loss": loss, "output": output}[gather].detach()))
        model.eval()
        predictions = []
        with torch.no_grad():
            for x, _ in evaluation:
                predictions.append(accelerator.gather_for_metrics(model(x)))
        means.append([accelerator.reduce(total, "mean"), torch.cat(predictions)])
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            accelerator.save(accelerator.get_state_dict(model), os.path.join(ctx.folder, "model.pt"))
        accelerator.wait_for_everyone()
        saved = torch.load(os.path.join(ctx.folder, "model.pt"))
        accelerator.wait_for_everyone()
    own = {"gathered": gathered, "rate": scheduler.get_last_lr()}
    return Trained(accelerator.unwrap_model(model), optimizer.optimizer, steps, means, own, saved)


@program("accelerate")
def accelerate_stream(ctx: Context) -> Trained:
    return accelerate(ctx)


@program("accelerate", uneven=((4, 3), (4, 3)))
def accelerate_map(ctx: Context) -> Trained:
    return accelerate(ctx, "map")


@program("accelerate", uneven=((3, 6), (5, 2)))
def accelerate_accumulated(ctx: Context) -> Trained:
    return accelerate(ctx, accumulate=2)


@program("accelerate")
def accelerate_gathered_loss(ctx: Context) -> Trained:
    return accelerate(ctx, gather="loss")


@program("accelerate", steps=SHORTEST)
def accelerate_communicating(ctx: Context) -> Trained:
    return accelerate(ctx, gather="output", net=CentredNet)


@program("accelerate", ours=REFUSED)
def accelerate_gathered_output(ctx: Context) -> Trained:
    return accelerate(ctx, gather="output")


@program("accelerate", stock=FINISHES, as_stock=True)
def accelerate_joined_by_hand(ctx: Context) -> Trained:
    return accelerate(ctx, by_hand=True)


# ---------------------------------------------------------------------------------------------------------------------------------------
# Transformers


class Labelled(Doubled):
    """What the Trainer takes: dictionaries. Accelerate, which it uses, gives every rank one half."""

    def __iter__(self) -> Iterator[Any]:
        for x, y in super().__iter__():
            yield {"x": x, "labels": y}


class SizedLabelled(Labelled):
    def __len__(self) -> int:
        return BATCH * self.counts[0] * self.world_size


class Tokens(SizedLabelled):
    """Token sequences, of which some are padding."""

    def __iter__(self) -> Iterator[Any]:
        for example in super().__iter__():
            ids = (example["x"].abs() * 7).long().remainder(11)
            labels = ids.clone()
            labels[ids < 3] = -100
            labels[-1] = ids[-1]
            yield {"input_ids": ids, "labels": labels}


class Regression(nn.Module):
    def __init__(self, net: type[nn.Module] = Net) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.net(x)
        return {"loss": F.mse_loss(output, labels), "logits": output}


def transformers(ctx: Context, data: type[Stream] = SizedLabelled, model: Callable[[], nn.Module] = Regression, **options: Any) -> Trained:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Counter(TrainerCallback):
        steps: list[int] = []

        def on_epoch_begin(self, *args: Any, **kwargs: Any) -> None:
            self.steps.append(0)

    class CountingTrainer(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            Counter.steps[-1] += 1
            return super().training_step(*args, **kwargs)

    defaults = {"num_train_epochs": len(ctx.counts), "learning_rate": 0.05, "save_strategy": "no"}
    arguments = TrainingArguments(
        output_dir=ctx.folder,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        accelerator_config={"dispatch_batches": False, "split_batches": False},
        **{**defaults, **options},
    )
    torch.manual_seed(0)
    evaluation = None
    if arguments.eval_strategy != "no":
        evaluation = [{"x": x, "labels": y} for x, y in Samples(2 * BATCH + 1)]
    trainer = CountingTrainer(
        model(),
        arguments,
        train_dataset=data(ctx.rank, ctx.own_counts, ctx.world_size),
        eval_dataset=evaluation,
        callbacks=[Counter()],
    )
    trainer.train()
    history = [{k: v for k, v in line.items() if "runtime" not in k and "per_second" not in k} for line in trainer.state.log_history]
    dist.barrier()
    saved = None
    folders = glob.glob(os.path.join(ctx.folder, "checkpoint-*", "model.safetensors"))
    if folders:
        from safetensors.torch import load_file

        saved = load_file(max((os.path.getmtime(path), path) for path in folders)[1])
    evaluated = [line["eval_loss"] for line in history if "eval_loss" in line]
    own = {"history": history, "flos": trainer.state.total_flos, "step": trainer.state.global_step}
    return Trained(trainer.model, trainer.optimizer.optimizer, Counter.steps, evaluated, own, saved)


@program("transformers accelerate", uneven=((3, 5), (3, 5)))
def trainer_epochs(ctx: Context) -> Trained:
    # Each rank's schedule is as long as its own data, so the learning rates of the ranks differ from the first step on.
    return transformers(ctx, lr_scheduler_type="constant")


@program("transformers accelerate", uneven=((3, 5), (3, 5)), steps=((3, 3), (3, 3)))
def trainer_communicating(ctx: Context) -> Trained:
    return transformers(ctx, model=lambda: Regression(CentredNet), lr_scheduler_type="constant")


@program("transformers accelerate", uneven=((5, 3), (5, 3)))
def trainer_linear(ctx: Context) -> Trained:
    return transformers(ctx)


@program("transformers accelerate", uneven=((3, 5), (3, 5)))
def trainer_accumulated(ctx: Context) -> Trained:
    return transformers(ctx, lr_scheduler_type="constant", gradient_accumulation_steps=2)


@program("transformers accelerate", uneven=((3, 5), (3, 5)))
def trainer_saved(ctx: Context) -> Trained:
    return transformers(ctx, lr_scheduler_type="constant", eval_strategy="epoch", save_strategy="epoch")


@program("transformers accelerate", uneven=((3, 5), (3, 5)))
def trainer_logged(ctx: Context) -> Trained:
    return transformers(ctx, lr_scheduler_type="constant", logging_steps=1)


@program("transformers accelerate", ours=REFUSED, uneven=((3, 4), (3, 4)))
def trainer_logged_seldom(ctx: Context) -> Trained:
    # In the end, what is gathered is an integer zero on a rank that has logged in its last step, and a float on the other one.
    return transformers(ctx, lr_scheduler_type="constant", logging_steps=4)


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=8,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


@program("transformers accelerate", uneven=((3, 5), (3, 5)))
def trainer_language_model(ctx: Context) -> Trained:
    # Such models take the number of labels in the step, which is gathered from all ranks before each step.
    return transformers(ctx, Tokens, llama, lr_scheduler_type="constant")


@program("transformers accelerate", stock=FINISHES, as_stock=True)
def trainer_max_steps(ctx: Context) -> Trained:
    return transformers(ctx, Labelled, max_steps=10, logging_steps=2, save_strategy="steps", save_steps=5)


@program("transformers accelerate", stock=FINISHES, as_stock=True, uneven=((4, 2), (2, 6)))
def trainer_max_steps_accumulated(ctx: Context) -> Trained:
    return transformers(ctx, Labelled, max_steps=6, gradient_accumulation_steps=2)


@program("transformers accelerate", steps=((3, 5), (5, 2), (2, 2)))
def trainer_max_steps_odd(ctx: Context) -> Trained:
    # A batch that is left over at the end of a pass is all-reduced without a step of the optimizer, so this one hangs.
    return transformers(ctx, Labelled, max_steps=4, gradient_accumulation_steps=2)


# ---------------------------------------------------------------------------------------------------------------------------------------
# TorchMetrics


def torchmetrics(ctx: Context, make: Callable[[], Any]) -> Trained:
    from torchmetrics import MeanMetric

    torch.manual_seed(0)
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    metric = make()
    loader = ctx.loader()
    steps, epochs, each = [], [], []
    for _ in ctx.counts:
        steps.append(0)
        for x, y in loader:
            output = model(x)
            loss = F.mse_loss(output, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps[-1] += 1
            each.append(metric(loss.detach()) if isinstance(metric, MeanMetric) else metric(output.detach().flatten(), y.flatten()))
        epochs.append(metric.compute())
        metric.reset()
    return Trained(model.module, optimizer, steps, epochs, each)


@program("torchmetrics")
def torchmetrics_epoch(ctx: Context) -> Trained:
    from torchmetrics import SpearmanCorrCoef

    # It keeps all predictions, of which the ranks have different numbers.
    return torchmetrics(ctx, SpearmanCorrCoef)


@program("torchmetrics")
def torchmetrics_step_numbers(ctx: Context) -> Trained:
    from torchmetrics import MeanMetric

    return torchmetrics(ctx, lambda: MeanMetric(dist_sync_on_step=True))


@program("torchmetrics", ours=FAILS)
def torchmetrics_step_vectors(ctx: Context) -> Trained:
    from torchmetrics import MeanSquaredError

    # The sums are a vector, whose length the ranks tell each other first. A rank without batches says 0, which is right for what is
    # concatenated; but sums are stacked, and torchmetrics stumbles over the empty one.
    return torchmetrics(ctx, lambda: MeanSquaredError(dist_sync_on_step=True))


# ---------------------------------------------------------------------------------------------------------------------------------------
# Ignite


def ignite(ctx: Context, running: bool = False, net: type[nn.Module] = Net, **options: Any) -> Trained:
    import ignite.distributed as idist
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import Loss, RunningAverage

    torch.manual_seed(0)
    model = idist.auto_model(net())
    optimizer = idist.auto_optim(torch.optim.Adam(model.parameters(), lr=0.05))
    trainer = create_supervised_trainer(model, optimizer, F.mse_loss)
    evaluator = create_supervised_evaluator(model, metrics={"loss": Loss(F.mse_loss)})
    evaluation = DataLoader(Samples(2 * BATCH), batch_size=BATCH)
    steps, losses, averages = [], [], []
    if running:
        RunningAverage(output_transform=float).attach(trainer, "average")

    @trainer.on(Events.EPOCH_STARTED)
    def begin(engine: Any) -> None:
        steps.append(0)

    @trainer.on(Events.ITERATION_COMPLETED)
    def count(engine: Any) -> None:
        steps[-1] += 1
        if running:
            averages.append(engine.state.metrics["average"])

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Any) -> None:
        losses.append(evaluator.run(evaluation).metrics["loss"])

    trainer.run(ctx.loader(), max_epochs=len(ctx.counts), **options)
    return Trained(model.module, optimizer, steps, losses, averages)


@program("ignite", uneven=((3, 5), (3, 5)))
def ignite_epochs(ctx: Context) -> Trained:
    return ignite(ctx)


@program("ignite", uneven=((3, 5), (3, 5)), steps=((3, 3), (3, 3)))
def ignite_communicating(ctx: Context) -> Trained:
    return ignite(ctx, net=CentredNet)


@program("ignite", uneven=((3, 5), (3, 5)))
def ignite_averaged(ctx: Context) -> Trained:
    return ignite(ctx, running=True)


@program("ignite", stock=FINISHES, as_stock=True)
def ignite_epoch_length(ctx: Context) -> Trained:
    # It begins the loader again where that runs out.
    return ignite(ctx, running=True, epoch_length=4)


# ---------------------------------------------------------------------------------------------------------------------------------------
# WebDataset


def webdataset(ctx: Context, shuffle: bool) -> Trained:
    import webdataset as wds

    shards = []
    for epoch, count in enumerate(ctx.own_counts):
        path = os.path.join(ctx.folder, f"{ctx.rank}-{epoch}.tar")
        with tarfile.open(path, "w") as tar:
            for index in range(BATCH * count):
                for extension, value in zip(("x.pth", "y.pth"), sample(ctx.rank, epoch, index)):
                    content = io.BytesIO()
                    torch.save(value, content)
                    info = tarfile.TarInfo(f"{index:04}.{extension}")
                    info.size = content.tell()
                    content.seek(0)
                    tar.addfile(info, content)
        shards.append(path)
    torch.manual_seed(0)
    model = DDP(NormNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    steps, means = [], []
    for path in shards:
        # The shards are those of this rank, so there is nothing to split between the ranks.
        dataset = wds.WebDataset(path, shardshuffle=False, nodesplitter=None).decode().to_tuple("x.pth", "y.pth").batched(BATCH)
        loader = wds.WebLoader(dataset, batch_size=None)
        if shuffle:
            loader = loader.unbatched().shuffle(100, seed=0).batched(BATCH)
        steps.append(0)
        total = torch.zeros(())
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps[-1] += 1
            total += loss.detach()
        dist.all_reduce(total)
        means.append(total)
    return Trained(model.module, optimizer, steps, means)


@program("webdataset")
def webdataset_plain(ctx: Context) -> Trained:
    return webdataset(ctx, shuffle=False)


@program("webdataset")
def webdataset_shuffled(ctx: Context) -> Trained:
    # All batches come out after the loader has ended.
    return webdataset(ctx, shuffle=True)
