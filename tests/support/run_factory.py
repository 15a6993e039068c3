"""Writes small run folders as `ecgmatch train` does: random but consistent predictions, metrics by scikit-learn."""

import copy
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from sklearn import metrics as sk

from ecgmatch_dist.config import Config
from ecgmatch_dist.data.split_file import digest

CLASSES = ("CD", "Rhythm", "STT", "Other", "Normal")
DATABASES = ("g12ec", "ptbxl", "ningbo", "chapman")
PREVALENCE = np.array([0.15, 0.6, 0.3, 0.2, 0.12])
METHODS = {
    "mixmatch": 0.5,
    "fixmatch": 1.5,
    "flexmatch": 1.6,
    "dst": 1.4,
    "percentmatch": 1.55,
    "softmatch": 1.6,
    "ups": 1.65,
}
QUALITY = {"supervised": 1.2, **METHODS, "ecgmatch": 1.9}
"""Distance between the logits of positives and negatives, per method."""


RANKINGS = sk.average_precision_score, sk.roc_auc_score


def measure(labels: NDArray[np.uint8], p: NDArray[np.float32], thresholds: NDArray[np.float64]) -> dict[str, Any]:
    """The metrics of result.json, by scikit-learn."""
    guess = (p >= thresholds).astype(int)
    # All classes by one call: scikit-learn's checks of its arguments take longer than its sums.
    precision, recall, fbeta, _ = sk.precision_recall_fscore_support(labels, guess, beta=2, zero_division=0)
    confusion = sk.multilabel_confusion_matrix(labels, guess)
    present = np.flatnonzero((labels.min(axis=0) == 0) & (labels.max(axis=0) == 1))
    ap, auc = (np.atleast_1d(score(labels[:, present], p[:, present], average=None)) for score in RANKINGS)
    of_class: dict[str, Any] = {}
    for c, short in enumerate(CLASSES):
        entry: dict[str, Any] = dict.fromkeys(("ap", "auc", "gbeta", "fbeta", "precision", "recall"))
        if c in present:
            _, fp, fn, tp = confusion[c].ravel()
            entry = {"ap": float(ap[present == c].item()), "auc": float(auc[present == c].item())}
            entry |= {"gbeta": float(tp / (tp + fp + 2 * fn)), "fbeta": float(fbeta[c])}
            entry |= {"precision": float(precision[c]), "recall": float(recall[c])}
        of_class[short] = {**entry, "prevalence": float(labels[:, c].mean()), "threshold": float(thresholds[c])}
    absent = [short for c, short in enumerate(CLASSES) if c not in present]

    def macro(name: str) -> float:
        return float(np.mean([v[name] for s, v in of_class.items() if s not in absent]))

    return {
        "ranking_loss": sk.label_ranking_loss(labels, p),
        "hamming_loss": sk.hamming_loss(labels, guess),
        "coverage": sk.coverage_error(labels, p),
        "map": macro("ap"),
        "macro_auc": macro("auc"),
        "macro_gbeta": macro("gbeta"),
        "macro_fbeta": macro("fbeta"),
        "accuracy": sk.accuracy_score(labels, guess),
        "per_class": of_class,
        "absent": absent,
    }


def predict(
    rng: np.random.Generator, labels: NDArray[np.uint8], quality: float, features: int
) -> dict[str, NDArray[Any]]:
    """Probabilities correlated with the labels, and features made from the same logits."""
    logits = quality * (2.0 * labels - 1) + rng.normal(0, 1.5, labels.shape)
    p = (1 / (1 + np.exp(-logits))).astype(np.float32)
    z = logits @ rng.normal(size=(labels.shape[1], features)) + rng.normal(size=(len(labels), features))
    return {"probabilities": p, "features": z.astype(np.float32)}


def split_of(protocol: str, database: str, ratio: float, seed: int, sizes: dict[str, int]) -> dict[str, Any]:
    """A split of `sizes` recordings: 0.8/0.1/0.1 within and mix, 0.9/0.1 and the whole held-out database for cross."""
    databases = {"within": [database], "cross": [d for d in sizes if d != database], "mix": list(sizes)}[protocol]
    parts: dict[str, list[str]] = {part: [] for part in ("labelled", "unlabelled", "validation", "test")}
    for name in databases:
        keys = [f"{name}/r{i:05}" for i in range(sizes[name])]
        train = int(len(keys) * (0.9 if protocol == "cross" else 0.8))
        stop = len(keys) if protocol == "cross" else int(len(keys) * 0.9)
        labelled = max(1, int(train * ratio))
        parts["labelled"] += keys[:labelled]
        parts["unlabelled"] += keys[labelled:train]
        parts["validation"] += keys[train:stop]
        parts["test"] += keys[stop:]
    if protocol == "cross":
        parts["test"] = [f"{database}/r{i:05}" for i in range(sizes[database])]
    where = "mix" if protocol == "mix" else f"{protocol}-{database}"
    split = {
        "name": f"{where}@{ratio:g}.s{seed}",
        "protocol": protocol,
        "databases": databases,
        "test_database": database if protocol == "cross" else None,
        "ratio": ratio,
        "seed": seed,
        "scheme": "ecgmatch5",
        "stratified": True,
        "parts": parts,
        "counts": {},
        "manifests": {},
    }
    return {**split, "sha256": digest(split), "format": 1}


def write_curves(folder: Path, rng: np.random.Generator, method: str, final: float, steps: int) -> None:
    lines = []
    for step in range(10, steps + 1, 10):
        done = step / steps
        train = {"loss": 0.5 - 0.2 * done + rng.normal(0, 0.01), "loss/b": 0.3 - 0.1 * done, "lr": 0.03 * (1 - done)}
        if method == "ecgmatch":
            train |= {"loss/u": 0.1 - 0.05 * done, "loss/f": 0.2 - 0.1 * done}
        lines.append({"step": step, "time": 1e9 + step, "kind": "train", **train})
        if step % 50 == 0:
            value = {"map": final * (0.6 + 0.4 * done) + rng.normal(0, 0.005), "macro_auc": 0.7 + 0.2 * done}
            if method == "ecgmatch":
                value |= {
                    "hidden/pseudo_map": final * (0.5 + 0.4 * done),
                    "hidden/own_map": final * (0.55 + 0.4 * done),
                }
                value |= {f"hidden/pseudo_ap/{c}": 0.9 - 0.1 * i + 0.1 * done for i, c in enumerate(CLASSES)}
                value |= {f"weight/{c}": 0.8 - 0.1 * i + 0.1 * done for i, c in enumerate(CLASSES)}
            lines.append({"step": step, "time": 1e9 + step, "kind": "validation", **value})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@functools.cache
def _perfect() -> dict[str, Any]:
    """The metrics of a model that knows one recording of each class."""
    labels = np.eye(len(CLASSES), dtype=np.uint8)
    return measure(labels, labels.astype(np.float32), np.full(len(CLASSES), 0.5))


def example_result(**metrics: float) -> dict[str, Any]:
    """A result.json with these metrics on validation and test."""
    measured = copy.deepcopy(_perfect()) | metrics
    split = split_of("within", "chapman", 0.05, 20, {"chapman": 100})
    about = {key: split[key] for key in ("protocol", "databases", "test_database", "ratio", "seed", "scheme")}
    about |= {"name": "run", "split": split["name"], "split_sha256": split["sha256"], "method": "ecgmatch", "tag": ""}
    about |= {"steps": 10, "best_step": 10, "stopped": "steps", "seconds": 1.0, "world_size": 1, "fingerprint": "f"}
    lists = {"classes": list(CLASSES), "thresholds": [0.5] * len(CLASSES)}
    return {"format": 2, **about, **lists, "validation": measured, "test": measured}


def write_run(
    root: Path,
    method: str = "ecgmatch",
    *,
    protocol: str = "within",
    database: str = "chapman",
    ratio: float = 0.05,
    seed: int = 20,
    sizes: dict[str, int] | int = 2000,
    tag: str = "",
    change: dict[str, Any] | None = None,
    quality: float | None = None,
    features: int = 8,
    steps: int = 200,
) -> Path:
    """One run folder. `change`: settings as {"method.lambda_u": 0.0}; `sizes`: recordings per database."""
    sizes = dict.fromkeys(DATABASES, sizes) if isinstance(sizes, int) else sizes
    split = split_of(protocol, database, ratio, seed, sizes)
    name = f"{split['name']}.{method}" + (f".{tag}" if tag else "")
    rng = np.random.default_rng(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
    truth = np.random.default_rng([seed, len(split["parts"]["test"])])
    folder = root / name
    (folder / "predictions").mkdir(parents=True)

    config = Config(split=Path(f"splits/{split['name']}.json"), tag=tag).to_json()
    if method != "ecgmatch":
        config["method"] = {"name": method}
    for key, value in (change or {}).items():
        *path, last = key.split(".")
        inner = config
        for step in path:
            inner = inner[step]
        inner[last] = value
    fingerprint = hashlib.sha256(json.dumps([config, tag], sort_keys=True).encode()).hexdigest()[:16]

    thresholds = np.full(len(CLASSES), 0.4)
    measured = {}
    for part in ("validation", "test"):
        n = max(len(split["parts"][part]), 30)
        labels = (truth.random((n, len(CLASSES))) < PREVALENCE).astype(np.uint8)
        arrays = predict(rng, labels, quality or QUALITY.get(method, 1.0), features)
        ids = np.array([*split["parts"][part], *(f"more/{i}" for i in range(n))][:n])
        with (folder / "predictions" / f"{part}.npz").open("wb") as file:
            np.savez(file, ids=ids, labels=labels, probabilities=arrays["probabilities"], features=arrays["features"])
        measured[part] = measure(labels, arrays["probabilities"], thresholds)
    if method == "ecgmatch":
        R = np.eye(len(CLASSES)) * 0.7 + 0.2
        np.savez(folder / "correlation.npz", R_b=R, R_u=np.clip(R + rng.normal(0, 0.05, R.shape), 0, 1))
    notes = {"classes": CLASSES, "scheme": "ecgmatch5", "thresholds": thresholds.tolist(), "step": steps, "model": {}}
    notes |= {"preprocess": {"rate": 100, "length": 1024}}
    save_file(
        {"w": np.zeros(1, np.float32)},
        folder / "best.safetensors",
        {name: json.dumps(value) for name, value in notes.items()},
    )
    write_curves(folder, rng, method, measured["validation"]["map"], steps)

    environment = {"version": "0.1.0", "git": "abc1234", "torch": "2.13.0", "devices": ["cpu"], "world_size": 2}
    environment["started"] = "2026-01-01T00:00:00+00:00"
    result = {key: split[key] for key in ("protocol", "databases", "test_database", "ratio", "seed", "scheme")} | {
        "format": 2,
        "name": name,
        "split": split["name"],
        "split_sha256": split["sha256"],
        "classes": list(CLASSES),
        "method": method,
        "tag": tag,
        "steps": steps,
        "best_step": steps - 50,
        "stopped": "steps",
        "seconds": 61.5,
        "world_size": 2,
        "precision": "fp32",
        "thresholds": thresholds.tolist(),
        "started_from": None,
        "fingerprint": fingerprint,
        **measured,
    }
    files = {
        "config.json": {"format": 2, "fingerprint": fingerprint, **config},
        "environment.json": environment,
        "split.json": split,
        "result.json": result,
    }
    for target, content in files.items():
        (folder / target).write_text(json.dumps(content))
    return folder


PAPER_SIZES = {"g12ec": 9906, "ptbxl": 19634, "ningbo": 34324, "chapman": 9717}


def write_paper_sweep(
    root: Path, sizes: dict[str, int] | int, methods: tuple[str, ...], seeds: tuple[int, ...], **more: Any
) -> None:
    """Within and cross on four databases, and mix: with eight methods and three seeds, the paper's 216 runs."""
    for method in methods:
        for seed in seeds:
            for database in DATABASES:
                write_run(root, method, database=database, seed=seed, sizes=sizes, **more)
                write_run(root, method, protocol="cross", database=database, ratio=0.01, seed=seed, sizes=sizes, **more)
            write_run(root, method, protocol="mix", ratio=0.01, seed=seed, sizes=sizes, **more)
