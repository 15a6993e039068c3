"""Figures of one run, or of one run per method on the same split, from the files of their folders."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, precision_recall_curve, roc_auc_score, roc_curve

from ecgmatch_dist.metrics import looked_at
from ecgmatch_dist.report import display
from ecgmatch_dist.report.calibration import net_benefit, reliability, treat_all
from ecgmatch_dist.report.drawing import INK, RULE, colour, method_colour, panels
from ecgmatch_dist.report.run_files import Curve, correlations, curves, features, predictions
from ecgmatch_dist.report.runs import FinishedRun

POINTS = 250
"""Points per drawn curve: more cannot be seen and make the page slow."""
MAX_LABELLED = 10
"""With more classes there is no room for numbers and legends."""
LEGEND_OUTSIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.02)}
"""Right of the axes, where a legend covers no curve."""
WEIGHTS = ("validation:weight", "train:agreement")
"""Curves of the pseudo-labels' weight per class: of most methods, and ECGMatch's agreement of neighbours."""
HIDDEN_PREFIXES = ("hidden/", "pseudo/")
"""Of curves that are measured against the hidden labels of the unlabelled part."""
HIDDEN_WORDS = {"pseudo_map": "pseudo-labels", "own_map": "own predictions"}


def thin_indices(n: int, points: int = POINTS) -> NDArray[np.int64]:
    """At most `points` of n indices, including the first and the last."""
    return np.unique(np.linspace(0, n - 1, min(n, points)).round().astype(np.int64))


def smooth(curve: Curve) -> Curve:
    """The means of at most POINTS equally long pieces."""
    groups = np.array_split(np.arange(len(curve.steps)), min(len(curve.steps), POINTS))
    return Curve(np.array([curve.steps[g[-1]] for g in groups]), np.array([curve.values[g].mean() for g in groups]))


def training(runs: Sequence[FinishedRun], chosen: FinishedRun) -> Figure | None:
    """Validation MAP of every method, and the chosen run's losses and pseudo-label weights."""
    all_curves = {run: curves(run) for run in runs}
    own = all_curves[chosen]
    parts = {name: curve for name, curve in own.items() if name.startswith("train:loss")}
    weight = {c: curve for c in chosen.classes for name in WEIGHTS if (curve := own.get(f"{name}/{c}"))}
    scores = {run: found["validation:map"] for run, found in all_curves.items() if "validation:map" in found}
    shown = [bool(scores), bool(parts), bool(weight)]
    if not any(shown):
        return None
    figure, axes = panels(sum(shown), 3, 4.1, 3.0, (0.5, 0.5, 0.95, 0.36), below=0.3 * bool(scores))
    rest = iter(axes)
    if scores:
        axis = next(rest)
        for run, curve in scores.items():
            highlighted = run == chosen
            axis.plot(
                *smooth(curve),
                color=method_colour(run.method),
                lw=2 if highlighted else 1.2,
                zorder=3 if highlighted else 2,
                label=display.method(run.method),
            )
        axis.set_title("Validation MAP")
        figure.legend(*axis.get_legend_handles_labels(), loc="lower left", ncols=len(scores))
    for title, group in (("Training loss", parts), ("Weight of pseudo-labels", weight)):
        if not group:
            continue
        axis = next(rest)
        for i, (name, curve) in enumerate(group.items()):
            axis.plot(
                *smooth(curve),
                color=INK if name == "train:loss" else colour(i),
                label=name.removeprefix("train:"),
                lw=1.2,
            )
        axis.set_title(f"{title}, {display.method(chosen.method)}")
        if len(group) <= MAX_LABELLED:
            axis.legend(**LEGEND_OUTSIDE)
    for axis in axes:
        axis.set_xlabel("step")
    return figure


def pseudo_labels(runs: Sequence[FinishedRun], chosen: FinishedRun) -> Figure | None:
    """Quality of the pseudo-labels against the hidden labels: of every method, and per class for the chosen run."""
    found = {run: hidden_label_curves(run) for run in runs}
    totals = {run: {k: v for k, v in group.items() if k.count("/") == 0} for run, group in found.items()}
    of_class = {
        c: v
        for c in chosen.classes
        for k, v in found[chosen].items()
        if k.endswith(f"/{c}") and not k.startswith("own")
    }
    shown = [any(totals.values()), bool(of_class)]
    if not any(shown):
        return None
    figure, axes = panels(sum(shown), 2, 6.1, 3.0, (0.5, 0.5, 1.85, 0.36))
    rest = iter(axes)
    if shown[0]:
        axis = next(rest)
        lines = (("pseudo", "-"), ("own", "--"))
        for run, group in totals.items():
            for name, curve in group.items():
                dash = next((d for start, d in lines if name.startswith(start)), ":")
                axis.plot(
                    *smooth(curve),
                    dash,
                    color=method_colour(run.method),
                    label=f"{display.method(run.method)}: {HIDDEN_WORDS.get(name, name)}",
                    lw=1.4,
                )
        axis.set_title("Pseudo-labels against hidden labels")
        axis.legend(**LEGEND_OUTSIDE)
    if of_class:
        axis = next(rest)
        for i, (name, curve) in enumerate(of_class.items()):
            axis.plot(*smooth(curve), color=colour(i), label=name, lw=1.4)
        axis.set_title(f"By class, {display.method(chosen.method)}")
        if len(of_class) <= MAX_LABELLED:
            axis.legend(**LEGEND_OUTSIDE)
    for axis in axes:
        axis.set_xlabel("step")
    return figure


def hidden_label_curves(run: FinishedRun) -> dict[str, Curve]:
    """Curves of pseudo-label quality without their prefix: pseudo_map, pseudo_ap/CD, ..."""
    out = {}
    for name, curve in curves(run).items():
        short = name.partition(":")[2]
        for prefix in HIDDEN_PREFIXES:
            if short.startswith(prefix):
                out[short.removeprefix(prefix)] = curve
    return out


def roc_pr(run: FinishedRun) -> Figure:
    """ROC and precision-recall curve of each class on the test part."""
    labels, p = predictions(run)
    figure, (roc, pr) = panels(2, 2, 5.2, 3.6, (0.5, 0.5, 1.25, 0.36))
    for c, name in enumerate(run.classes):
        y, score = looked_at(labels, p, c)
        if not len(y) or y.min() == y.max():
            continue
        x, t, _ = roc_curve(y, score)
        keep = thin_indices(len(x))
        roc.plot(x[keep], t[keep], color=colour(c), lw=1.3, label=f"{name} {roc_auc_score(y, score):.3f}")
        precision, recall, _ = precision_recall_curve(y, score)
        keep = thin_indices(len(recall))
        pr.plot(
            recall[keep],
            precision[keep],
            color=colour(c),
            lw=1.3,
            label=f"{name} {average_precision_score(y, score):.3f}",
        )
    roc.plot([0, 1], [0, 1], color=RULE, lw=1)
    for axis, title, x_label, y_label in (
        (roc, "ROC (area)", "false positive rate", "recall"),
        (pr, "Precision-recall (average precision)", "recall", "precision"),
    ):
        axis.set(title=title, xlabel=x_label, ylabel=y_label, xlim=(-0.01, 1.01), ylim=(-0.01, 1.02))
        axis.legend(**LEGEND_OUTSIDE, fontsize=8 if len(run.classes) < 15 else 6)
    return figure


def reliability_diagram(run: FinishedRun) -> Figure:
    """Observed frequency over predicted probability, one panel per class; the bars below show the number of recordings."""
    labels, p = predictions(run)
    figure, axes = panels(len(run.classes), 5, 2.25, 2.35)
    for c, (axis, name) in enumerate(zip(axes, run.classes, strict=True)):
        y, score = looked_at(labels, p, c)
        if not len(y):
            axis.set(title=f"{name}: not looked for")
            continue
        bins = reliability(y, score)
        axis.plot([0, 1], [0, 1], color=RULE, lw=1)
        axis.vlines(bins.confidence, 0, 0.3 * bins.count / bins.count.max(), color=colour(c), lw=4, alpha=0.3)
        axis.plot(bins.confidence, bins.frequency, color=colour(c), lw=1, marker="o", ms=3)
        axis.set(title=f"{name}  ECE {bins.ece:.3f}", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    axes[0].set(xlabel="probability", ylabel="observed frequency")
    return figure


def decision_curves(run: FinishedRun) -> Figure:
    """Net benefit of acting on the model, on everyone, on nobody, over the threshold probability, one panel per class."""
    labels, p = predictions(run)
    p_t = np.linspace(0.01, 0.99, 99)
    figure, axes = panels(len(run.classes), 5, 2.3, 2.2, (0.6, 0.5, 0.15, 0.36), below=0.25)
    for c, (axis, name) in enumerate(zip(axes, run.classes, strict=True)):
        y, score = looked_at(labels, p, c)
        if not len(y):
            axis.set(title=f"{name}: not looked for")
            continue
        prevalence = float(y.mean())
        axis.plot(p_t, treat_all(prevalence, p_t), color=INK, lw=0.9, ls=":", label="act on all")
        axis.axhline(0, color=INK, lw=0.9, label="act on none")
        axis.plot(p_t, net_benefit(y, score, p_t), color=colour(c), label="model")
        axis.set(title=name, ylim=(-0.25 * prevalence - 0.01, 1.1 * prevalence + 0.01), xlim=(0, 1))
    axes[0].set(xlabel="threshold probability", ylabel="net benefit")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower left", ncols=3)
    return figure


def confusion(run: FinishedRun) -> Figure:
    """Of the recordings with class i, the share that is predicted to have class j."""
    labels, p = predictions(run)
    guess = p >= np.array(run.thresholds)
    with np.errstate(invalid="ignore"):
        share = ((labels == 1).T.astype(np.float64) @ guess) / (labels == 1).sum(axis=0)[:, None]
    figure = heat_maps({"Predicted among true": share}, run.classes, 0, 1)
    return figure


def correlation(run: FinishedRun) -> Figure | None:
    """The label correlations of labelled data and of predictions, and their difference."""
    found = correlations(run)
    if found is None:
        return None
    R_b, R_u = found
    return heat_maps({"R_b, labelled": R_b, "R_u, unlabelled": R_u, "R_u − R_b": R_u - R_b}, run.classes, 0, 1)


def heat_maps(named: dict[str, NDArray[np.float64]], classes: Sequence[str], low: float, high: float) -> Figure:
    """C x C heat maps with their numbers; a difference (a minus in its name) gets a diverging scale."""
    side = max(2.2, (0.4 if len(classes) <= MAX_LABELLED else 0.2) * len(classes))
    figure, axes = panels(len(named), 3, side + 0.85, side + 1.0, (0.7, 0.64, 0.15, 0.36))
    for axis, (title, matrix) in zip(axes, named.items(), strict=True):
        diverging = "−" in title
        reach = max(0.05, float(np.nanmax(np.abs(matrix)))) if diverging else 1.0
        scale = (
            {"vmin": -reach, "vmax": reach, "cmap": "RdBu_r"}
            if diverging
            else {"vmin": low, "vmax": high, "cmap": "Blues"}
        )
        axis.pcolormesh(matrix[::-1], edgecolors="none", **scale)  # type: ignore[arg-type]
        places = np.arange(len(classes)) + 0.5
        axis.set_xticks(
            places, classes, rotation=30 if len(classes) < 8 else 90, ha="right" if len(classes) < 8 else "center"
        )
        axis.set_yticks(places, classes[::-1])
        axis.set(title=title, aspect="equal")
        axis.grid(False)
        axis.tick_params(length=0)
        for spine in axis.spines.values():
            spine.set_visible(False)
        for (i, j), x in np.ndenumerate(matrix[::-1]) if len(classes) <= MAX_LABELLED else ():
            dark = abs(x) / reach > 0.6
            axis.text(
                j + 0.5,
                i + 0.5,
                f"{x:.2f}",
                ha="center",
                va="center",
                fontsize=8,
                color="#ffffff" if dark else "#1c2025",
            )
    return figure


def feature_map(run: FinishedRun, points: int = 700) -> Figure:
    """The bank's features (the test part's, without a bank) on their principal axes, one panel per class."""
    z, labels = features(run)
    keep = np.sort(np.random.default_rng(0).permutation(len(z))[:points])
    centred = z.astype(np.float64) - z.mean(axis=0, dtype=np.float64)
    variance, axes_of = np.linalg.eigh(centred.T @ centred)
    share = variance[::-1][:2] / max(variance.sum(), 1e-12)
    directions = axes_of[:, ::-1][:, :2]
    directions *= np.sign(directions[np.abs(directions).argmax(axis=0), [0, 1]])  # an eigenvector's sign is arbitrary
    flat = (centred @ directions)[keep]
    figure, axes = panels(len(run.classes), 5, 2.2, 2.2, (0.3, 0.3, 0.15, 0.36))
    for c, (axis, name) in enumerate(zip(axes, run.classes, strict=True)):
        has = labels[keep, c] == 1  # where nobody has looked, the point is drawn like one without the class
        axis.scatter(flat[~has, 0], flat[~has, 1], s=3, color=RULE, lw=0, rasterized=True)
        axis.scatter(flat[has, 0], flat[has, 1], s=4, color=colour(c), lw=0, rasterized=True)
        axis.set(title=name, xticks=[], yticks=[])
        axis.grid(False)
    axes[0].set(xlabel=f"first axis ({share[0]:.0%})", ylabel=f"second axis ({share[1]:.0%})")
    return figure
