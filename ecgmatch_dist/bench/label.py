"""Labels needed to reach a MAP: recordings chosen by `ecgmatch label` against recordings chosen at random.

A simulated reader answers with the labels of the database. The model is the one that grows beside the page; it is measured on
recordings that are never asked about, a quarter of the patients.
"""

import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from ecgmatch_dist.data.assign import all_units
from ecgmatch_dist.data.labels import known
from ecgmatch_dist.data.split_file import labels_of
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import write_json
from ecgmatch_dist.label.choose import FIRST, Chooser
from ecgmatch_dist.label.draw import picture
from ecgmatch_dist.label.features import Features
from ecgmatch_dist.label.growing import MODELS, best_model, learn, learning_curve
from ecgmatch_dist.label.session import EVERY
from ecgmatch_dist.label.space import Space
from ecgmatch_dist.metrics import macro_ap
from ecgmatch_dist.terminal.waiting import track

Way = Literal["bank", "random"]
STEP = 20  # labels between two points of a curve
TEST = 0.25
FEATURES = 460  # about as many as there are measurements
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Database:
    """A database with all labels: features [N, F], labels [N, C], and the patient of each recording [N]."""

    name: str
    features: NDArray[np.float32]
    labels: NDArray[np.uint8]
    patients: Ints


def main(
    shards: str = "data/shards",
    databases: tuple[str, ...] = ("chapman", "ptbxl"),
    scheme: str = "ecgmatch5",
    seeds: tuple[int, ...] = (11, 12, 13, 14, 15),
    labels: int = 200,
    cache: Path = Path("bench_label"),
    plot: Path | None = None,
    to: Path | None = None,
    features: str = "",
    scale: int = 0,
) -> None:
    """Simulate readers, and count the labels that each way of choosing needs.

    Args:
        shards: Folder of the shards.
        databases: Each is simulated by itself.
        scheme: Label scheme.
        seeds: Each draws other test recordings and begins elsewhere.
        labels: Answers of a reader; the MAP that random ones reach with them is the aim.
        cache: Folder for the measurements of the recordings, which take minutes.
        plot: Draw the curves into this .svg or .png file.
        to: Write the curves as JSON.
        features: Folder of a run, such as a contrastive one: its features choose and teach, as with `ecgmatch label
            --features`; else ECG measurements do.
        scale: Measure something else, without shards: how long the next question takes among this many made-up recordings.
    """
    if scale:
        return show_scale(scale)
    if labels < 2 * STEP or labels % STEP or len(seeds) < 1:
        raise UserError(f"--labels {labels}: a multiple of {STEP}, at least {2 * STEP}, and at least one seed")
    curves: dict[str, dict[str, list[dict[str, float]]]] = {}
    for name in databases:
        database = load(shards, name, scheme, cache, features)
        jobs: list[tuple[Way, int]] = [(way, seed) for seed in seeds for way in ("random", "bank")]
        found: dict[str, list[dict[str, float]]] = {"random": [], "bank": []}
        for way, seed in track(jobs, f"{name}: simulated readers", len(jobs)):
            found[way].append(simulate(database, way, seed, labels, tuple(MODELS) if features else ("forest",)))
            curves[name] = found
            if to:
                write_json(to, curves)
    show(curves, labels, len(seeds))
    if plot:
        draw(curves, labels, plot)


def load(shards: str, name: str, scheme: str, cache: Path, run: str = "") -> Database:
    """Measure the recordings of a database that have labels."""
    store = ShardStore(shards, [name])
    labels = labels_of(store, scheme)
    rows = np.flatnonzero(known(labels))
    cache.mkdir(parents=True, exist_ok=True)
    features = Features(cache / f"{name}.{'network' if run else 'features'}", shards, store, rows, run)
    if not features.complete:
        print(f"{name}: measuring {len(rows) - features.done:,} recordings", flush=True)
        features.measure(threading.Event())
    return Database(name, features.all(), labels[rows], all_units(store)[rows])


def simulate(
    database: Database, way: Way, seed: int, labels: int, models: tuple[str, ...] = ("forest",)
) -> dict[str, float]:
    """One reader: number of answers -> MAP on the test recordings; `cv`: what cross-validation says at the end."""
    order = np.random.default_rng(seed).permutation(int(database.patients.max()) + 1)
    is_test = np.isin(database.patients, order[: round(TEST * len(order))])
    pool, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    features, y = database.features[pool], database.labels[pool]
    chooser = Chooser(Space(features, seed), database.patients[pool], seed)
    asked: list[int] = []
    curve: dict[str, float] = {}
    while len(asked) < labels:
        found = chooser.next(random=way == "random")
        if found is None:
            raise UserError(f"{database.name}: only {len(asked)} recordings to ask about; give fewer --labels")
        chooser.take(found[0])
        asked.append(found[0])
        if len(asked) % EVERY and len(asked) % STEP:
            continue
        model = best_model(features[asked], y[asked], seed, models)
        predict = learn(model, features[asked], y[asked], seed)
        if way == "bank":
            chooser.learn(predict(features), y[asked])
        if len(asked) % STEP == 0:
            curve[str(len(asked))] = macro_ap(database.labels[test], predict(database.features[test]))
    curve["cv"] = learning_curve(features[asked], y[asked], seed, (1.0,), model)[0][-1][1].value
    return curve


def needed(curve: dict[int, float], aim: float) -> float:
    """Labels at which a curve first reaches the aim, between its points by a straight line; infinite: never."""
    sizes = sorted(curve)
    for before, here in zip([None, *sizes], sizes, strict=False):
        if curve[here] >= aim:
            if before is None:
                return here
            return before + (here - before) * (aim - curve[before]) / (curve[here] - curve[before])
    return float("inf")


def mean_curve(curves: list[dict[str, float]]) -> dict[int, float]:
    return {int(n): float(np.mean([curve[n] for curve in curves])) for n in curves[0] if n != "cv"}


def ratio(found: dict[str, list[dict[str, float]]], labels: int, chosen: Ints) -> float:
    """Labels that the bank needs for random's MAP at `labels`, as a share of these; means over the chosen seeds."""
    random, bank = (mean_curve([found[way][i] for i in chosen]) for way in ("random", "bank"))
    return needed(bank, random[labels]) / labels


def show(curves: dict[str, dict[str, list[dict[str, float]]]], labels: int, seeds: int) -> None:
    table = Table(title=f"MAP on test recordings, mean of {seeds} seeds", title_justify="left")
    table.add_column("database, way")
    sizes = list(range(2 * STEP, labels + 1, 2 * STEP))
    for n in sizes:
        table.add_column(str(n), justify="right")
    table.add_column("cross-validated", justify="right")
    for name, found in curves.items():
        for way, some in found.items():
            mean = mean_curve(some)
            inside = float(np.mean([curve["cv"] for curve in some]))
            table.add_row(f"{name}, {way}", *(f"{mean[n]:.3f}" for n in sizes), f"{inside:.3f}")
    console = Console()
    console.print(table)
    for name, found in curves.items():
        rng = np.random.default_rng(0)
        share = ratio(found, labels, np.arange(seeds))
        again = [ratio(found, labels, rng.integers(0, seeds, seeds)) for _ in range(1000)]
        low, high = np.quantile(again, [0.05, 0.95], method="nearest")
        console.print(
            f"{name}: the bank needs {share * labels:.0f} labels for the MAP that {labels} random ones reach: a share of "
            f"{share:.2f} (90 % interval over seeds {low:.2f} to {high:.2f})",
            highlight=False,
        )


def show_scale(n: int) -> None:
    """Time and memory of the next question among n recordings with features at random."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((n, FEATURES), np.float32)
    begin = time.perf_counter()
    space = Space(features)
    made = time.perf_counter() - begin
    chooser = Chooser(space, np.arange(n))
    chooser.learn(rng.random((n, 5), np.float32), np.eye(5, dtype=np.uint8))
    signal = rng.standard_normal((12, 1000)).astype(np.float16)
    seconds = []
    for _ in range(2 * FIRST):  # the first ones spread, the others go by gain
        clock, worked = time.perf_counter(), time.thread_time()
        found = chooser.next()
        assert found
        chooser.take(found[0])
        chosen = time.thread_time()
        picture(signal, 100, "made up")
        seconds.append((time.perf_counter() - clock, chosen - worked, time.thread_time() - chosen))
    whole, choosing, drawing = (1e3 * np.median(column) for column in zip(*seconds, strict=True))
    arrays = features.nbytes + space.points.nbytes + space.density.nbytes + chooser.near.nbytes + 4 * 5 * n
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{n:,} recordings: choosing computes for {choosing:.0f} ms, drawing for {drawing:.0f} ms")
    print(
        f"the clock says {whole:.0f} ms (more than both: the machine was busy); the space was made once, in {made:.0f} s"
    )
    print(f"arrays {arrays / 2**20:.0f} MiB, the process at most {memory:.0f} MiB")


def draw(curves: dict[str, dict[str, list[dict[str, float]]]], labels: int, path: Path) -> None:
    """One picture per database: every seed thin, the means thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "label"  # the same bytes each time
    figure, axes = pyplot.subplots(
        1, len(curves), figsize=(4.6 * len(curves), 3.4), squeeze=False, layout="constrained"
    )
    for axis, (name, found) in zip(axes[0], curves.items(), strict=True):
        for way, colour in (("random", "#8a929c"), ("bank", "#1c62c4")):
            for curve in found[way]:
                points = sorted((int(n), value) for n, value in curve.items() if n != "cv")
                axis.plot(*zip(*points, strict=True), color=colour, alpha=0.25, linewidth=0.8)
            axis.plot(
                *zip(*sorted(mean_curve(found[way]).items()), strict=True), color=colour, linewidth=2.2, label=way
            )
        aim = mean_curve(found["random"])[labels]
        axis.axhline(aim, color="#555", linewidth=0.8, linestyle="--")
        axis.set(title=name, xlabel="labels", ylabel="MAP on test recordings")
        axis.legend(frameon=False, loc="lower right")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
