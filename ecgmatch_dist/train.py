"""Train one run: the loop, and the `ecgmatch train` command.

    ecgmatch train --split splits/within-chapman@0.05.s20.json --shards data/shards            one process
    ecgmatch train --ranks 8 --split ... --shards ...                                          one node
    torchrun --nproc-per-node 8 -m ecgmatch_dist.train --split ... --shards ...                the same
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m ecgmatch_dist.train ...

`--preset NAME` chooses the settings to start from, `--method NAME` the method, and `--help-all` lists every setting. A finished
run is not trained again, and an interrupted one is resumed. docs/run-folder.md describes the run folder.
"""

import os
import sys
import time
from contextlib import ExitStack
from types import ModuleType

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ecgmatch_dist.arguments import parse, pop_option
from ecgmatch_dist.config import Config, fitted
from ecgmatch_dist.distributed.collectives import all_sum_nograd
from ecgmatch_dist.distributed.devices import use_deterministic_algorithms
from ecgmatch_dist.distributed.launcher import end_rank, start_ranks
from ecgmatch_dist.distributed.session import Ranks, session
from ecgmatch_dist.distributed.whereabouts import during
from ecgmatch_dist.errors import UserError, memory_told
from ecgmatch_dist.learner import Learner
from ecgmatch_dist.methods.views import Pass, Views
from ecgmatch_dist.metrics import best_thresholds, compute_metrics
from ecgmatch_dist.network.optim import gradient_norm, learning_rate, set_learning_rate, step_if_finite
from ecgmatch_dist.readiness import check_before_training, load_split
from ecgmatch_dist.record.folder import RunFolder
from ecgmatch_dist.record.logger import memory_gib
from ecgmatch_dist.record.start_weights import check_same_everywhere, pinned
from ecgmatch_dist.record.starts import Chain, starts_of
from ecgmatch_dist.recovery.heartbeat import Heartbeat, ending_at_once
from ecgmatch_dist.recovery.signals import Signals, Stopped, StopRequest
from ecgmatch_dist.run.build import build_run
from ecgmatch_dist.run.run import Run
from ecgmatch_dist.run.with_trees import answer_with_trees

LESS_MEMORY = (
    "on more ranks, or on a larger machine, the run goes on from its last checkpoint; smaller evaluate.batch, "
    "optim.unlabelled_batch or model.width make another run (`ecgmatch plan` estimates memory)"
)


def train_loop(run: Run, stop: StopRequest) -> str:
    """Train until the end. Returns why it ended: "steps", "patience" or "stopped"."""
    config, best = run.config, run.best
    clock = time.perf_counter()
    for labelled, unlabelled in run.batches():
        waited = time.perf_counter() - clock

        # views: this rank's share of the global batch, on the device
        views = run.views(labelled, unlabelled)

        # losses, backward, optimiser, teacher
        rate = learning_rate(config.optim, *run.learner.method.phase(run.step))
        losses = train_step(run.learner, views, rate, run.unlabelled_pass)

        # a gradient that is not finite has changed no weight; nothing that follows from it is shown or saved
        run.step += 1
        run.finite.add(losses["gradient_norm"], run.step)
        stopped = stop.agreed()
        last = run.step == config.optim.steps
        logs, saves = due(run.step, config.runtime.log_every), due(run.step, config.runtime.save_every)
        validates = (due(run.step, config.evaluate.every) and run.step > run.learner.method.validate_after) or last
        if bad := run.finite.now() if logs or validates or saves or stopped else stop.not_finite:
            raise not_finite(run, bad, stop)

        # log
        run.logger.moved(run.step)
        run.diagnostics.add(views.ids_u, losses)
        seconds = time.perf_counter() - clock
        run.seconds += seconds
        if logs:
            log(run, losses, {"lr": rate, "time/step": seconds, "time/data": waited})

        # validate: keep the best model, count validations without a better one
        if validates:
            validate(run, views)

        # checkpoint
        patience = best.checks_since >= config.evaluate.patience
        if saves or last or patience or stopped:
            run.save()
        if last or patience or stopped:
            return "steps" if last else "patience" if patience else "stopped"
        clock = time.perf_counter()
    raise AssertionError("the stream of batches ended before the last step")


def train_step(learner: Learner, views: Views, rate: float, unlabelled: Pass) -> dict[str, Tensor]:
    """One step. Returns the result of the method's `losses`, and the norm of the gradient."""
    student, teacher, bank, optimizer = learner.student, learner.teacher, learner.bank, learner.optimizer

    # the method: for ECGMatch, the teacher writes to the bank and the student searches it for neighbours
    learner.method.prepare(views.step, student, bank, unlabelled)
    if views.step and learner.method.phase(views.step)[0] == 0:
        optimizer.state.clear()  # a later round begins from its starting weights: the momentum belongs to others
    losses = learner.method.losses(views, student, teacher, bank)

    # the step
    set_learning_rate(optimizer, rate)
    optimizer.zero_grad(set_to_none=True)
    loss = losses["loss"].detach()
    with during("gradients"):
        losses["loss"].backward(gradient=loss - loss + 1)  # type: ignore[no-untyped-call]  # 1, or NaN: then on all ranks
    norm = gradient_norm(learner.model)
    step_if_finite(optimizer, norm)
    teacher.update(learner.model, views.step)
    return losses | {"gradient_norm": norm}


def not_finite(run: Run, step: int, stop: StopRequest) -> UserError:
    """The error of a step whose loss or gradient is not finite, with the recordings of its batch. A collective."""
    names, wrong = run.recordings(step)
    everywhere: list[tuple[list[str], list[str]]] = [(names, wrong)] * run.ranks.world
    if stop.distributed:
        dist.all_gather_object(everywhere, (names, wrong), group=stop.group)
    names, wrong = (sorted({name for lists in everywhere for name in lists[i]}) for i in (0, 1))
    run.logger.say(f"step {step}: not finite; the recordings of its batch: {' '.join(names)}")
    cause = (
        f"{len(wrong)} of the {len(names)} recordings in its batch have values that are not finite, {some(wrong)}: "
        "leave them out, or build their shards again"
        if wrong
        else f"all signals in its batch are finite ({some(names)}; all are in log.txt): lower optim.lr"
    )
    return UserError(f"step {step}: the loss or its gradient is not finite, so no weight was changed; {cause}")


def some(names: list[str], most: int = 10) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def draws(step: int, every: int, steps: int) -> bool:
    """Whether the validation at `step` draws curves and pictures. Not each: all ranks wait while rank 0 draws."""
    return step in (every, steps) or due(step, 5 * every)


def log(run: Run, losses: dict[str, Tensor], values: dict[str, float]) -> None:
    """Log the step's scalars as means over the ranks."""
    names = [name for name, value in losses.items() if value.ndim == 0]
    means = all_sum_nograd(torch.stack([losses[name].detach().double() for name in names])) / run.ranks.world
    values = dict(zip(names, means.tolist(), strict=True)) | values
    batch = sum(stream.batch for stream in (run.labelled, run.unlabelled) if stream)
    values |= {"throughput": batch / values["time/step"], "memory_gib": memory_gib(run.ranks.device)}
    values["time/save"], run.stalled = run.stalled, 0.0
    run.folder.fence.check()
    if bank := run.learner.bank:
        values |= {"bank/age": bank.age(run.step), **bank.times()}
    run.logger.scalars(run.step, "train", values)
    run.logger.progress(run.step, values)


def validate(run: Run, views: Views) -> None:
    """Measure the model on the validation part, and keep it if it is the best so far."""
    if run.learner.method.probes:
        run.fit_probe()
    predictions = run.predict("validation")
    thresholds = best_thresholds(predictions.labels, predictions.probabilities)
    metrics = compute_metrics(predictions.labels, predictions.probabilities, thresholds, run.classes)
    if run.best.update(run.step, metrics.map, thresholds.tolist()):
        run.keep_best()
    scalars = metrics.scalars()
    scalars |= {f"ap/{name}": values.ap for name, values in metrics.per_class.items() if values.ap is not None}
    run.folder.fence.check()
    logger = run.logger
    logger.scalars(run.step, "validation", scalars | run.diagnostics.summary())
    if draws(run.step, run.config.evaluate.every, run.config.optim.steps):
        logger.curves(run.step, run.classes, predictions.labels, predictions.probabilities)
        images = run.learner.method.images(views)
        logger.images(run.step, run.classes, images.signals, images.matrices)
    mark = "kept" if run.best.step == run.step else f"best {run.best.map:.4f} at step {run.best.step}"
    logger.say(f"step {run.step}: validation MAP {metrics.map:.4f}, macro AUC {metrics.macro_auc:.4f} ({mark})")


def finish(run: Run, reason: str, stop: StopRequest) -> bool:
    """Measure the kept model on validation and test with the thresholds of the validation, and write the result. False: the run
    was asked to stop meanwhile."""
    run.checkpointer.wait()
    run.load_best()
    thresholds = np.array(run.best.thresholds)
    measured, found = {}, {}
    for part in ("labelled", "validation", "test"):  # `ecgmatch predict` shows labelled recordings as nearest cases
        predictions = found[part] = run.predict(part)
        if part != "labelled":
            measured[part] = compute_metrics(predictions.labels, predictions.probabilities, thresholds, run.classes)
        if run.ranks.main:
            run.folder.save_predictions(part, run.parts.ids(part), predictions)
        if stop.agreed():
            return False
    told = answer_with_trees(run, found) if run.config.method.asks_trees else ""
    artifacts = run.learner.method.artifacts(lambda: run.predict("unlabelled", limit=20_000))
    if run.ranks.main:
        for name, arrays in artifacts.items():
            run.folder.save_arrays(run.folder.path / name, arrays)
        run.folder.finish(run.result(reason, measured), run.split)
        if warning := run.worse_than_start():
            run.logger.say(warning)
    test = measured["test"]
    run.logger.say(
        f"finished ({reason}) after {run.seconds:.0f} s: test MAP {test.map:.4f}, macro AUC {test.macro_auc:.4f}{told}"
    )
    return True


def train_run(config: Config, ranks: Ranks, signals: Signals, chain: Chain | None = None) -> RunFolder:
    """Train one run to its result, resuming what its folder holds. The runs that it starts from are trained first, as links of
    its chain."""
    split = load_split(config.split)
    folder = RunFolder(config.runs / config.run_name(split.name))
    folder.check(config)
    # Rank 0 decides, because another node may not see the result yet. Before the starts: their folders may be deleted by now.
    if all_sum_nograd(torch.tensor(int(ranks.main and folder.finished))).item():
        place = chain.place(config) if chain else ""
        if ranks.main:
            told = f"{folder.path.name}: finished already, test MAP {folder.result().test.map:.4f}"
            print(f"run {place}: {told}" if place else told, flush=True)
        return folder
    if chain is None:
        check_before_training(config, split, ranks.main)
        chain = Chain(config)
    unlabelled = split.size("unlabelled")
    counts = split.size("labelled"), min(unlabelled, config.data.unlabelled or unlabelled)
    fitted(config, *counts).check_shares(ranks.world)  # `build_run` knows whose labels are unknown, and checks again
    if not config.data.archive:  # it fills the bank, too; how far is known later
        config.method.check_size(*counts, config.optim.unlabelled_batch)
    starts = [train_run(start, ranks, signals, chain) for start in starts_of(config, split.name, ranks)]
    place = chain.place(config)
    if ranks.main and place:
        print(f"run {place}: {folder.path.name}", flush=True)
    folder.enter(config, ranks)
    heartbeat = Heartbeat(folder.fence.workspace, ranks.rank, ranks.world, config.runtime.timeout_minutes)
    with ExitStack() as at_the_end, folder.fence.translate_errors(), heartbeat, memory_told(LESS_MEMORY):
        at_the_end.callback(folder.fence.release)
        run = build_run(config, ranks, folder, split, starts)
        at_the_end.callback(run.logger.close)
        heartbeat.say = run.logger.say
        resumed = run.resume()
        run.logger.start(run.step, place)
        if resumed:
            run.logger.say(f"resumed at step {run.step}")
        elif folder.fence.generation > 1:
            run.logger.say("was started before and has no checkpoint: begins again at step 0")
        stop = StopRequest(signals, folder.fence, run.finite)
        at_the_end.callback(stop.close)
        reason = run.ended() or train_loop(run, stop)
        if reason == "stopped" or not finish(run, reason, stop):
            run.checkpointer.wait()
            run.logger.say(f"asked to stop: saved at step {run.step}, the same command continues from there")
            raise Stopped(stop.warned)
    return folder


def train(config: Config) -> RunFolder:
    """Train the run of `config`. This process is one of the ranks that a launcher has started, or the only one. Returns the run
    folder. A finished run is not trained again."""
    mine = not dist.is_initialized()
    with (
        session(config.runtime.device, config.runtime.timeout_minutes, config.runs / "flight-recorder") as ranks,
        ending_at_once(ranks.rank, ranks.world if mine else 1),
        Signals() as signals,
    ):
        torch.set_num_threads(config.runtime.threads or ranks.threads)
        if config.runtime.deterministic and ranks.device.type == "cuda":
            use_deterministic_algorithms()
        config = pinned(config.settled())
        if config.weights:
            check_same_everywhere(config)
        return train_run(config, ranks, signals)


def main(args: list[str]) -> None:
    """`ecgmatch train`."""
    ranks, args = pop_option(args, "--ranks", None, "1")
    try:
        config = parse(args)  # before the ranks are started: a mistake is told once
    except UserError:
        if os.environ.get("RANK", "0") == "0":
            raise
        sys.exit(1)  # the first rank makes the same mistake, and says so
    if ranks == "1":
        train(config)
    elif not ranks.isdecimal() or ranks == "0" or "RANK" in os.environ:
        raise UserError(
            f"--ranks {ranks}: a number of processes on this machine, and not together with another launcher"
        )
    else:
        start_ranks(int(ranks), "ecgmatch_dist.train", args)


class _CallableModule(ModuleType):
    """`ecgmatch_dist.train` names this module and the function of the Python API: calling the module calls the function."""

    def __call__(self, config: Config) -> RunFolder:
        return train(config)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (Exception, KeyboardInterrupt) as error:
        end_rank(error, int(os.environ.get("RANK", "0")))
        raise
