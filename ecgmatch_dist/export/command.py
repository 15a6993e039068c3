"""`ecgmatch export`: a folder that holds a model and all that is needed to use it, in the usual layout of a model hub."""

import shutil
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from ecgmatch_dist import resources
from ecgmatch_dist.data.formats.recording import Rejected
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.export.card import card
from ecgmatch_dist.export.challenge import write_entry
from ecgmatch_dist.export.html_page import write_page
from ecgmatch_dist.export.onnx_file import about, check_onnx, check_signals, need_onnx, write_onnx
from ecgmatch_dist.export.ort_web import find_ort_web
from ecgmatch_dist.export.trees import write_trees
from ecgmatch_dist.files.atomic import write_atomic, write_json, write_text
from ecgmatch_dist.measurements import trees_file
from ecgmatch_dist.predict.files import find_files
from ecgmatch_dist.predict.model import Predictor
from ecgmatch_dist.predict.read import Reader
from ecgmatch_dist.record import ancestors
from ecgmatch_dist.record.calibration import to_file
from ecgmatch_dist.record.second_opinion import copy_opinion
from ecgmatch_dist.terminal.waiting import waiting


def main(
    run: tyro.conf.Positional[Path],
    /,
    to: Path,
    rate: float = 500.0,
    seconds: float = 10.0,
    check: tuple[Path, ...] = (),
    onnx: bool = True,
    html: bool = False,
    onnxruntime_web: Path | None = None,
    challenge: Path | None = None,
    trees: bool = False,
    shards: str = "",
) -> None:
    """Write a model to a folder: model.safetensors, config.json, README.md (the model card), model.onnx.

    `em.load` reads the folder. The ONNX graph takes raw signals of one rate and length; all preprocessing is inside it. The
    folder holds no recordings: a model that was loaded from it names no nearest cases.

    Args:
        run: The run's folder.
        to: The new folder.
        rate: Samples per second of the signals that the graph takes.
        seconds: Their length.
        check: Recordings of that rate and length (files or folders), on which the graph is compared with `predict`.
        onnx: Write the graph, too (extra `onnx`).
        html: Write model.html, too: one page that runs the model in a browser and sends nothing (extra `onnx`).
        onnxruntime_web: The npm package for the page, if npm cannot fetch it here: a .tgz of `npm pack`, or its folder.
        challenge: Another new folder for an entry to the PhysioNet/CinC Challenge 2021: team_code.py, Dockerfile and all.
        trees: Write trees.safetensors, too: trees on measurements of the labelled recordings, for `train --weights`. If the
            run has asked trees, also those, for `predict --trees`.
        shards: Folder or URL of the shards that the trees learn from; default: where the run found them.
    """
    if shards and not trees:
        raise UserError(f"--shards {shards}: is read for the trees alone; give --trees, too, or leave it out")
    if onnx or html:
        need_onnx()
    for option, folder in (("--to", to), ("--challenge", challenge)):
        if folder and folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder}: not empty; remove it, or give another {option}")
    samples = round(rate * seconds)
    if rate < 1 or samples < 2:
        raise UserError(f"rate = {rate:g}, seconds = {seconds:g}: at least 1 sample per second, and two samples")
    with waiting("looking for onnxruntime-web"):  # after all that is refused at once: it may have to be fetched
        runtime = find_ort_web(onnxruntime_web) if html else None
    model = Predictor(run, "cpu", nearest=0)
    unfinished = to.absolute().with_name(f".{to.absolute().name}.unfinished")  # whoever finds `to` finds all of it
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        write_folder(unfinished, model, about(model, rate, samples) if onnx else None)
        if trees:
            with waiting("measuring the labelled recordings, growing trees"):
                learnt = write_trees(unfinished / trees_file.NAME, model, shards)
                copy_opinion(model.folder, unfinished)
            print(f"{to / trees_file.NAME}: trees of {learnt:,} labelled recordings")
        if onnx:
            graph = unfinished / "model.onnx"
            with waiting("making the ONNX graph and comparing it with `predict`"):
                write_atomic(graph, lambda path: write_onnx(path, model, rate, samples))
                signals = np.concatenate([check_signals(samples, rate), *originals(model, check, rate, samples)])
                worst = check_onnx(graph, model, rate, signals)
            print(f"{to / 'model.onnx'}: {len(signals)} recordings, at most {worst:.1e} from `predict`")
        if runtime:
            with waiting("making model.html"):
                worst = write_page(unfinished / "model.html", model, runtime)
            print(f"{to / 'model.html'}: open it in a browser; its graph is at most {worst:.1e} from `predict`")
        if challenge:
            write_entry(challenge, unfinished)
            print(f"{challenge}: an entry for the Challenge of 2021")
        unfinished.replace(to)
    except BaseException:
        for folder in (unfinished, challenge):
            if folder:
                shutil.rmtree(folder, ignore_errors=True)
        raise
    print(f"{to}: exported")


def write_folder(to: Path, model: Predictor, graph: dict[str, Any] | None) -> None:
    """All files but the graph."""
    for source, name in (
        (model.weights, "model.safetensors"),
        (resources.find("shards/labels", model.notes.scheme), "labels.toml"),
    ):
        write_atomic(to / name, partial(shutil.copyfile, source))
    if (own := model.folder / trees_file.NAME).is_file():
        write_atomic(to / trees_file.NAME, partial(shutil.copyfile, own))
    if model.exported:  # what an export has of it was meant to go with the model
        copy_opinion(model.folder, to)
    write_json(to / "calibration.json", to_file(model.calibration))
    names = dict(zip(model.classes, model.scheme.classes, strict=True))
    notes = asdict(model.notes) | {"name": model.name, "names": names}
    # Whoever begins with the weights must know what they have seen, also before this model.
    notes |= {"databases": list(ancestors.trained_on(model.folder))}
    notes |= {ancestors.ARCHIVE: True} if ancestors.from_archive(model.folder) else {}
    notes |= {ancestors.KEY: ancestors.to_file(ancestors.ancestors(model.folder))}
    write_json(to / "config.json", notes | {"calibration": to_file(model.calibration), "onnx": graph})
    write_text(to / "README.md", card(model, graph))


def originals(model: Predictor, paths: tuple[Path, ...], rate: float, samples: int) -> list[Any]:
    """Signals [1, 12, samples] of the recordings that the graph can take."""
    if not paths:
        return []
    reader, found = Reader(model.inputs), []
    for ref in find_files(paths):
        try:
            recording = reader.read(ref)
        except Rejected:
            continue
        if recording.rate == rate and recording.signal.shape[1] == samples and np.isfinite(recording.signal).all():
            found.append(recording.signal[None])
    if not found:
        raise UserError(f"--check: no recording of {samples} samples at {rate:g} Hz in {', '.join(map(str, paths))}")
    return found
