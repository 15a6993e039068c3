"""Train one run: build, resume, THE LOOP, finish.

    ecgmatch train --split splits/within-chapman@0.05.s20.json --shards data/shards            one process
    torchrun --nproc-per-node 8 -m ecgmatch_dist.train --split ... --shards ...                one node
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m ecgmatch_dist.train ...

`--preset NAME` chooses the settings to start from, `--method NAME` what to train with, `--help` lists every field. A finished
run is not run again, a started one is resumed. The run folder is described in docs/run-folder.md.
"""

import math
import os
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import get_args

import numpy as np
import torch
import tyro
from torch import Tensor

from ecgmatch_dist.config import Config
from ecgmatch_dist.data.splits import Split
from ecgmatch_dist.distributed import Ranks, all_sum_nograd, session
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.interrupt import Interrupt, Signals
from ecgmatch_dist.job import Job, build
from ecgmatch_dist.learner import Learner
from ecgmatch_dist.losses import correlation
from ecgmatch_dist.methods.base import Pass, Views
from ecgmatch_dist.methods.configs import MethodConfig, Supervised
from ecgmatch_dist.methods.ecgmatch import ECGMatch
from ecgmatch_dist.metrics import best_thresholds, compute_metrics
from ecgmatch_dist.monitor import memory_gib
from ecgmatch_dist.presets import PRESETS
from ecgmatch_dist.run import RunFolder, start_of
from ecgmatch_dist.schedule import learning_rate, set_learning_rate
from ecgmatch_dist.watchdog import Heartbeat, during


class Stopped(SystemExit):
    """The end of a run that was asked to stop, saved itself and wants to be started again; torchrun restarts this code."""

    def __init__(self, warned: bool) -> None:
        super().__init__(75)
        self.warned = warned
        """Slurm gave a warning, or the deadline came: the job can be queued again. A plain SIGTERM may be a cancelled job."""


def fit(job: Job, interrupt: Interrupt) -> str:
    """The loop. Returns why it ended: "steps", "patience" or "interrupted"."""
    config, best = job.config, job.best
    clock = time.perf_counter()
    for labelled, unlabelled in job.batches():
        waited = time.perf_counter() - clock
        # this rank's share of the global batch, and the weak and strong views of it
        views = job.views(labelled, unlabelled, job.step)

        # the method's losses, their gradients, the optimiser, the teacher
        rate = learning_rate(config.optim, job.step)
        losses = update(job, views, rate, job.unlabelled_pass)

        # what it looked like
        job.step += 1
        job.diagnostics.add(views.ids_u, losses)
        seconds = time.perf_counter() - clock
        job.seconds += seconds
        if due(job.step, config.runtime.log_every):
            log(job, losses, {"lr": rate, "time/step": seconds, "time/data": waited})

        # validation: keep the best model, count the checks without a better one
        last = job.step == config.optim.steps
        if (due(job.step, config.evaluate.every) and job.step > job.method.counts_from) or last:
            validate(job, views)

        # what must survive
        patience = best.checks_since >= config.evaluate.patience
        stopped = interrupt.agreed()
        if due(job.step, config.runtime.save_every) or last or patience or stopped:
            job.save()
        if last or patience or stopped:
            return "steps" if last else "patience" if patience else "interrupted"
        clock = time.perf_counter()
    raise AssertionError("the stream of batches ended before the last step")


def update(learner: Learner, views: Views, rate: float, unlabelled: Pass) -> dict[str, Tensor]:
    """One step. Returns what the method's `losses` did."""
    # the method: for ECGMatch, the teacher fills the bank and the student asks it for neighbours
    student, teacher, bank, optimizer = learner.student, learner.teacher, learner.bank, learner.optimizer
    learner.method.prepare(views.step, student, bank, unlabelled)
    losses = learner.method.losses(views, student, teacher, bank)

    # the step
    set_learning_rate(optimizer, rate)
    optimizer.zero_grad(set_to_none=True)
    with during("gradients"):
        losses["loss"].backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    teacher.update(learner.model, views.step)
    return losses


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def log(job: Job, losses: dict[str, Tensor], values: dict[str, float]) -> None:
    """The step's numbers, as means over the ranks. A loss that is not a number ends the run on all of them."""
    names = [name for name, value in losses.items() if value.ndim == 0]
    means = all_sum_nograd(torch.stack([losses[name].detach().double() for name in names])) / job.ranks.world
    values = dict(zip(names, means.tolist(), strict=True)) | values
    if not math.isfinite(values["loss"]):
        raise UserError(f"step {job.step}: the loss is {values['loss']}; lower optim.lr, or look at the inputs")
    seen = job.config.optim.labelled_batch + (job.config.optim.unlabelled_batch if job.unlabelled else 0)
    values |= {"throughput": seen / values["time/step"], "memory_gib": memory_gib(job.ranks.device)}
    values["time/save"], job.stalled = job.stalled, 0.0
    job.folder.fence.check()
    if job.bank:
        values |= {"bank/age": job.bank.age(job.step), **job.bank.times()}
    job.monitor.scalars(job.step, "train", values)
    job.monitor.tick(job.step, values)


def validate(job: Job, views: Views) -> None:
    """Measure the model on the validation part; keep it if it is the best so far."""
    predictions = job.predict("validation")
    thresholds = best_thresholds(predictions.labels, predictions.probabilities)
    metrics = compute_metrics(predictions.labels, predictions.probabilities, thresholds, job.classes)
    if job.best.update(job.step, metrics["map"], thresholds.tolist()):
        job.keep_best()
    scalars = {name: value for name, value in metrics.items() if isinstance(value, float)}
    scalars |= {f"ap/{name}": values["ap"] for name, values in metrics["per_class"].items() if values["ap"] is not None}
    job.folder.fence.check()
    monitor = job.monitor
    monitor.scalars(job.step, "validation", scalars | job.diagnostics.summary())
    monitor.curves(job.step, job.classes, predictions.labels, predictions.probabilities)
    if isinstance(job.method, ECGMatch):
        monitor.views(job.step, {"x_u": views.x_u, "w(x_u)": views.weak.x, "g(x_u)": views.strong.x})
        monitor.matrices(job.step, job.classes, job.method.R_b, job.method.R_u)
    mark = "kept" if job.best.step == job.step else f"best {job.best.map:.4f} at step {job.best.step}"
    monitor.say(f"step {job.step}: validation MAP {metrics['map']:.4f}, macro AUC {metrics['macro_auc']:.4f} ({mark})")


def finish(job: Job, reason: str, interrupt: Interrupt) -> bool:
    """Measure the kept model on validation and test with the validation's thresholds, and write the result. False: asked to
    stop on the way."""
    job.checkpointer.wait()
    job.load_best()
    thresholds = np.array(job.best.thresholds)
    measured = {}
    for part in ("labelled", "validation", "test"):  # the labelled ones are what `predict` shows as nearest cases
        predictions = job.predict(part)
        if part != "labelled":
            measured[part] = compute_metrics(predictions.labels, predictions.probabilities, thresholds, job.classes)
        if job.ranks.main:
            job.folder.save_predictions(part, job.ids(part), predictions)
        if interrupt.agreed():
            return False
    if isinstance(job.method, ECGMatch):
        bank = job.predict("unlabelled", most=20_000)
        R_u = correlation(torch.from_numpy(bank.probabilities), job.method.settings.similarity)
        if job.ranks.main:
            job.folder.save_arrays("correlation.npz", R_b=job.method.R_b.cpu().numpy(), R_u=R_u.numpy())
            job.folder.save_arrays("bank.npz", features=bank.features[:2000], labels=bank.labels[:2000])  # for the map
    if job.ranks.main:
        job.folder.finish(job.result(reason, measured))
    test = measured["test"]
    job.monitor.say(
        f"finished ({reason}) after {job.seconds:.0f} s: test MAP {test['map']:.4f}, macro AUC {test['macro_auc']:.4f}"
    )
    return True


def train(config: Config, ranks: Ranks) -> RunFolder:
    """One run, from whatever its folder holds to its result; the supervised runs that it starts from come first."""
    with Signals() as signals:
        return carry_out(config, ranks, signals)


def carry_out(config: Config, ranks: Ranks, signals: Signals) -> RunFolder:
    """`train`, for runs and their starts under the same signals."""
    split = Split.load(config.split)
    folder = RunFolder(config.runs / config.run_name(split.name))
    folder.check(config)
    # Rank 0 looks, as a folder may look different from another node; before the starts, which may have been cleared away.
    if all_sum_nograd(torch.tensor(int(ranks.main and folder.result is not None))).item():
        if ranks.main:
            assert folder.result is not None
            print(f"{folder.path.name}: finished already, test MAP {folder.result['test']['map']:.4f}", flush=True)
        return folder
    config.check_shares(ranks.world)
    starts = [
        carry_out(start_of(config, split.name, ranks, member), ranks, signals) for member in range(config.committee)
    ]
    folder.enter(config, ranks)
    heartbeat = Heartbeat(folder.fence.desk, ranks.rank, ranks.world, config.runtime.timeout_minutes)
    with ExitStack() as at_the_end, folder.fence.explained(), heartbeat:
        at_the_end.callback(folder.fence.leave)
        job = build(config, ranks, folder, split, starts)
        at_the_end.callback(job.monitor.close)
        heartbeat.say = job.monitor.say
        resumed = job.resume()
        job.monitor.start(job.step)
        if resumed:
            job.monitor.say(f"resumed at step {job.step}")
        elif folder.fence.generation > 1:
            job.monitor.say("was started before and has no checkpoint: begins again at step 0")
        interrupt = Interrupt(signals, folder.fence)
        at_the_end.callback(interrupt.close)
        reason = job.ended() or fit(job, interrupt)
        if reason == "interrupted" or not finish(job, reason, interrupt):
            job.checkpointer.wait()
            job.monitor.say(f"asked to stop: saved at step {job.step}, the same command goes on from there")
            raise Stopped(interrupt.warned)
    return folder


def parse(args: list[str]) -> Config:
    """`--preset` and `--method` decide which fields there are and what they start from; then come the fields."""
    preset, args = take(args, "--preset", PRESETS, "paper")
    base = PRESETS[preset]()
    methods = {method.name: method for method in get_args(MethodConfig)}
    name, args = take(args, "--method", methods, base.method.name)
    if name != base.method.name:
        base = replace(base, method=methods[name]())
    one_method = (tyro.conf.AvoidSubcommands,)
    config = tyro.cli(Config, default=base, args=args, prog="ecgmatch train", description=__doc__, config=one_method)
    return config.supervised() if isinstance(config.method, Supervised) else config


def take(args: list[str], option: str, known: Iterable[str], default: str) -> tuple[str, list[str]]:
    """The value of `option` and the other arguments; `option VALUE` or `option=VALUE`."""
    args = [part for arg in args for part in (arg.split("=", 1) if arg.startswith(f"{option}=") else [arg])]
    if option not in args:
        return default, args
    at = args.index(option)
    value = args[at + 1] if at + 1 < len(args) else ""
    if value not in known:
        raise UserError(f"{option} {value}: known are {', '.join(known)}")
    return value, args[:at] + args[at + 2 :]


def execute(config: Config) -> None:
    """The run on the ranks that a launcher has started, this process being one of them."""
    with session(config.runtime.device, config.runtime.timeout_minutes) as ranks:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(config.runtime.threads or max(1, cores // ranks.local_world))
        train(config, ranks)


def command(args: list[str]) -> None:
    execute(parse(args))


if __name__ == "__main__":
    try:
        command(sys.argv[1:])
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        sys.exit(f"ecgmatch: {error}" if rank == "0" else f"ecgmatch (rank {rank}): {error}")
    except KeyboardInterrupt:
        sys.exit(130)  # whoever started the ranks says what it means
