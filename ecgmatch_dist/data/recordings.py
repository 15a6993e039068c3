"""The recordings of a database: find them by its recipe, and read one as the twelve standard leads in mV with its labels."""

import re
from dataclasses import replace
from pathlib import Path

from ecgmatch_dist.data.annotations import Annotation
from ecgmatch_dist.data.databases import Recipe, Signals
from ecgmatch_dist.data.formats.leads import arrange, check_signal
from ecgmatch_dist.data.formats.read import format_of, read_tracing, refs_in
from ecgmatch_dist.data.formats.recording import Recording as Recording
from ecgmatch_dist.data.formats.recording import RecordRef as RecordRef
from ecgmatch_dist.data.formats.recording import Rejected as Rejected
from ecgmatch_dist.data.preprocess import LEADS as LEADS
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.walk import require_readable


def find_folder(recipe: Recipe, raw: Path) -> Path:
    """The folder of recordings: the first of the recipe's folders that exists under `raw`, otherwise `raw` itself."""
    if not raw.is_dir():
        raise UserError(f"{raw}: no such folder; --raw is the folder of the recordings of {recipe.database}")
    return next((raw / name for name in recipe.folders if (raw / name).is_dir()), raw)


def find_records(recipe: Recipe, raw: Path) -> list[RecordRef]:
    """All recordings, sorted by name."""
    folder = find_folder(recipe, raw)
    require_readable(folder)
    paths = {path for pattern in recipe.files for path in folder.glob(pattern)} - {folder / recipe.labels.file}
    if not paths:
        places = ", ".join(recipe.folders)
        raise UserError(
            f"{folder}: no recordings ({' or '.join(recipe.files)}) of {recipe.database}; --raw must be their folder, "
            f"or the one that holds {places or 'it'}"
        )
    refs: dict[str, RecordRef] = {}
    found = (ref for path in sorted(paths) for ref in refs_in(path, recipe.signals.format))
    for ref in (replace(ref, key=recipe.key(ref.key)) for ref in found):
        if ref.key in refs:
            raise UserError(
                f"two recordings are named {ref.key}: {refs[ref.key].path} and {ref.path}; "
                f"remove one, or rename them with `rename` in the recipe"
            )
        refs[ref.key] = ref
    return [refs[key] for key in sorted(refs)]


def read_recording(
    ref: RecordRef,
    annotations: dict[str, Annotation] | None = None,
    keep_unlisted: bool = False,
    signals: Signals = Signals(),
) -> Recording:
    """Read one recording, with labels from `annotations`, or from its header if None. What the table does not say of the
    patient, the header says. `keep_unlisted`: one that the table lacks has no codes. Raises Rejected."""
    if not re.fullmatch(r"[\w-]+", ref.key, re.ASCII):
        raise Rejected(
            "name", f"`{ref.key}` has other characters than letters, digits, _ and - (see `rename` in the recipe)"
        )
    tracing = read_tracing(ref, signals, signals.format)
    signal, flags = arrange(tracing, signals.lead_map, fill=signals.missing == "zero")
    if (
        format_of(ref.path, signals.format).name != "wfdb"
    ):  # the public databases keep recordings whose leads are all flat
        flags += check_signal(signal)
    if annotations is None:
        labels = Annotation(tracing.codes)
    elif ref.key in annotations:
        labels = annotations[ref.key]
    elif keep_unlisted:
        labels = Annotation(())
    else:
        raise Rejected("no label", "not in the table of labels")
    return Recording(
        ref.key,
        signal,
        tracing.rate,
        labels.codes,
        labels.patient or tracing.patient,
        labels.age or tracing.age,
        labels.sex or tracing.sex,
        labels.fold,
        flags,
    )
