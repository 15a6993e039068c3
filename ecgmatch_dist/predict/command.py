"""`ecgmatch predict`: ECGs of any format -> a table of predictions, and pages that show them with their reasons."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.table import Table as ScreenTable

from ecgmatch_dist.data.formats.recording import RecordRef
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import checksum, naming
from ecgmatch_dist.files.lock import only_one
from ecgmatch_dist.files.plain import plain_line, plain_markup
from ecgmatch_dist.predict.files import SILENT, find_files
from ecgmatch_dist.predict.flags import sentences
from ecgmatch_dist.predict.model import Predictor
from ecgmatch_dist.predict.page import Pages
from ecgmatch_dist.predict.read import Reader, as_options, label, lead_names, read_all
from ecgmatch_dist.predict.result import SEEN, Failure, Prediction
from ecgmatch_dist.predict.table import Table, writer_of
from ecgmatch_dist.terminal.waiting import track

ON_SCREEN = 10  # recordings whose answers are printed
MEANING = (
    "likely: at least 50 %; possible: at least the F2 threshold, set low so that few cases are missed. For research; not a "
    "medical device."
)


def main(
    run: tyro.conf.Positional[Path],
    records: tyro.conf.Positional[tuple[str, ...]],
    /,
    out: Path | None = None,
    pages: Path | None = None,
    nearest: int = 3,
    only: bool = True,
    trees: bool = False,
    rate: float | None = None,
    unit: str = "",
    leads: Annotated[str, tyro.conf.arg(metavar="'I II V1'")] = "",
    workers: int = min(8, len(os.sched_getaffinity(0))),
    batch: int = 32,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    shards: str = "",
) -> None:
    """Predict new recordings with the kept model of a finished run. For research; not a medical device.

    Args:
        run: The run's folder, one that `ecgmatch export` wrote, chapman_ptbxl (comes with the package), or a name on the hub.
        records: Files, folders, or lists of them (@list.txt, one path per line).
        out: Table of all predictions, with the reason for each file that cannot be read: .csv, .jsonl or .parquet.
        pages: Folder for one page per recording: ECG paper, probabilities, what mattered, the nearest known cases.
        nearest: Number of known cases to show.
        only: Normal is not predicted beside another class; --no-only: each class by its threshold alone.
        trees: The trees that the run has asked answer, too: better with few labels, and slower.
        rate: Samples per second of files that do not say it (CSV, NPY).
        unit: Of files that do not say it: uV, mV or V.
        leads: Names of the leads in their order, for files that do not say them; - for a column of something else.
        workers: Processes that read and preprocess.
        batch: Windows that go through the network at once.
        device: Where the network runs.
        shards: Folder of the shards with the nearest known cases, if it has moved since the training.
    """
    if not records:
        raise UserError("no recordings: name files or folders of ECGs after the run's folder")
    if out is not None:
        writer_of(out)
    refs = find_files(records, rate)
    if len(refs) > ON_SCREEN and out is None and pages is None:
        raise UserError(f"{len(refs):,} recordings: give a table for them, for example --out predictions.csv")
    model = Predictor(run, device, batch=batch, nearest=nearest, only=only, trees=trees)
    reader = Reader(model.inputs, rate, unit, lead_names(leads))
    show = Pages(model, reader, refs, pages, shards) if pages else None
    if out is None:
        found = map(as_options, model.answers(read_all(refs, reader, workers)))
        answers = track(found, "predicting", len(refs))
        failed = sum(tell(answer, model, show) for answer in answers)
        if failed < len(refs):
            print(MEANING)
    else:
        failed = fill(out, model, refs, reader, workers, show)
    if show:
        print(f"pages: {show.finish()}")
    if failed:
        reasons = f"; the reasons are in {out}" if out else ""
        silent = any(
            os.path.exists(ref.path) and (ref.item is not None or ref.path.suffix.lower() in SILENT) for ref in refs
        )
        silent &= not (rate and unit and leads)
        remedy = "; what CSV, NPY and HDF5 files do not say: --rate 500 --unit mV --leads 'I II V1'" if silent else ""
        raise UserError(f"{failed:,} of {len(refs):,} recordings could not be predicted{reasons}{remedy}")


def fill(out: Path, model: Predictor, refs: list[RecordRef], reader: Reader, workers: int, show: Pages | None) -> int:
    """Write the table, or what it still lacks. Returns the number of failures."""
    weights = checksum(model.weights)
    about = {"weights": weights, "only": model.only, "nearest": model.count, "rate": reader.rate, "unit": reader.unit}
    about |= {"trees": model.opinion.checksum} if model.opinion else {}
    lock = out.with_name(f".{out.name}.lock")
    taken = f"{out}: another command is writing this table; wait for it, or give another --out"
    with (
        naming(out, lock),
        only_one(lock, taken),
        removed_beside(out, lock),
        Table(out, about | {"leads": [*reader.leads]}, model.classes) as table,
    ):
        rest = [ref for ref in refs if label(ref) not in table.done]
        if table.done:
            print(f"{out}: continues after {len(table.done):,} recordings")
        found = map(as_options, model.answers(read_all(rest, reader, workers)))
        answers = track(found, "predicting", len(rest))
        for number, answer in enumerate(answers, 1):
            table.add(answer)
            if show and isinstance(answer, Prediction):
                show.add(answer)
            if number % model.batch == 0:
                table.flush()
    print(f"{out}: {len(refs):,} recordings, {table.failed:,} could not be predicted")
    return table.failed


@contextmanager
def removed_beside(out: Path, lock: Path) -> Iterator[None]:
    """Remove the lock file at the end, if the table is there. Two commands may then hold a file of this name each, an old and
    a new one, but both find the table and refuse to write it. Without a table, as after an interruption, the file stays."""
    try:
        yield
    finally:
        if out.exists():
            lock.unlink(missing_ok=True)


def tell(answer: Prediction | Failure, model: Predictor, show: Pages | None) -> bool:
    """Print an answer, or make its page. Returns whether it is a failure."""
    console = Console(highlight=False)
    if isinstance(answer, Failure):
        console.print(plain_line(f"{answer.path}: {answer.error}"), markup=False)
        return True
    if show:
        show.add(answer)
    console.print(on_screen(answer, model))
    return False


def on_screen(answer: Prediction, model: Predictor) -> ScreenTable:
    """The answer as a table."""
    out = ScreenTable("class", "probability", model.output, "F2 threshold", "answer", title_justify="left")
    out.title = plain_markup(answer.path)
    for name, full in zip(model.classes, model.scheme.classes, strict=True):
        words = "likely" * (name in answer.likely) or "possible" * (name in answer.predicted)
        numbers = (answer.calibrated[name], answer.probabilities[name], answer.thresholds[name])
        out.add_row(plain_markup(full), *(f"{number:.3f}" for number in numbers), words)
    lines = [text for text in (model.gave_way(answer), *(words for words, _ in sentences(answer.flags))) if text]
    if answer.seen:
        lines.append(SEEN)
    if answer.nearest:
        alike = (f"{c.id} ({', '.join(c.classes) or 'no class'}, {c.similarity:.2f})" for c in answer.nearest)
        lines.append(f"most like {'; '.join(alike)}")
    out.caption, out.caption_justify = "\n".join(map(plain_markup, lines)), "left"
    return out
