"""Files that a client sent -> answers. Several clients at once; the model answers one after the other.

Files are written to a temporary folder of their own, which is removed with the answer.
"""

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ecgmatch_dist.data.formats.read import BY_SUFFIX, refs_in
from ecgmatch_dist.data.formats.recording import RecordRef, Rejected
from ecgmatch_dist.data.header_limits import LARGEST_HEADER, MOST_SIGNALS
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.predict.known import KnownSignals
from ecgmatch_dist.predict.model import Predictor
from ecgmatch_dist.predict.page import render
from ecgmatch_dist.predict.read import Reader, lead_names
from ecgmatch_dist.predict.result import Failure

MOST_RECORDINGS = 100  # of one request; an HDF5 file may hold any number
WARNING = "For research. Not a medical device."
Row = dict[str, Any]


class Desk:
    """A model that answers for uploaded files. `shards`: where pictures of known cases come from."""

    def __init__(self, model: Predictor, shards: str = "") -> None:
        self.model, self.lock = model, threading.Lock()
        self.known = KnownSignals(model, shards)
        self.names = dict(zip(model.classes, model.scheme.classes, strict=True))

    def reader(self, said: dict[str, str]) -> Reader:
        """With what the client says about files that do not say it. Raises UserError."""
        rate = said.get("rate", "").strip()
        try:
            number = float(rate) if rate else None
        except ValueError:
            raise UserError(f"rate = {rate!r}: a number, samples per second") from None
        return Reader(self.model.inputs, number, said.get("unit", "").strip(), lead_names(said.get("leads", "")))

    def answer(self, files: dict[str, bytes], said: dict[str, str], until: float) -> Row:
        """One row per recording; those that time did not suffice for (`until`, time.monotonic) are failures."""
        reader, pages = self.reader(said), said.get("page") == "yes"
        with tempfile.TemporaryDirectory(prefix="ecgmatch-serve-") as place:
            folder = Path(place)
            for name, content in files.items():
                (folder / name).write_bytes(content)
            named = signal_files(files)
            paths = [folder / name for name in files]
            own = [path for path in paths if path.suffix.lower() in BY_SUFFIX or path.name not in named]
            refs = [ref for path in own for ref in refs_in(path)]
            if len(refs) > MOST_RECORDINGS:
                raise UserError(f"{len(refs):,} recordings, at most {MOST_RECORDINGS} at once; use `ecgmatch predict`")
            rows = [self.row(ref, reader, pages, until) for ref in refs]
        return {"model": self.model.name, "warning": WARNING, "names": self.names, "recordings": rows}

    def row(self, ref: RecordRef, reader: Reader, page: bool, until: float) -> Row:
        label = ref.path.name if ref.item is None else f"{ref.path.name}#{ref.item}"
        return outcome(label, str(ref.path.parent), lambda: self._row(ref, label, reader, page, until))

    def _row(self, ref: RecordRef, label: str, reader: Reader, page: bool, until: float) -> Row:
        recording = reader.read(ref)
        with self.lock:
            if time.monotonic() > until:
                raise UserError("no time was left for it; send fewer recordings at once")
            prediction = self.model.predict_recording(recording, label)
            html = render(self.model, recording, prediction, self.known) if page else None
        return prediction.to_json() | ({"page": html} if html else {})


def signal_files(files: dict[str, bytes]) -> set[str]:
    """The files that WFDB headers among these name: the first words of their lines. Only of what a header may hold, and
    once: a client may call anything a header."""
    headers = (content[:LARGEST_HEADER] for name, content in files.items() if name.endswith(".hea"))
    lines = (line for header in headers for line in header.splitlines()[: MOST_SIGNALS + 1])
    return {words[0].decode("utf-8", "replace") for line in lines if (words := line.split(maxsplit=1))}


def outcome(label: str, folder: str, work: Callable[[], Row]) -> Row:
    """The row, or one with the reason why there is none. The name of the temporary folder is nobody's business."""
    try:
        return work()
    except (Rejected, UserError) as error:
        reason = str(error)
    except Exception as error:  # one strange file must not take the others with it
        reason = f"unreadable: {type(error).__name__}: {error}"
    reason = reason.replace(f"{folder}/", "").replace(folder, "")
    if label.endswith(".hea") and "No such file" in reason:
        reason += "; send the header and its signal files together"
    elif label.endswith(".dat"):
        reason = f"{reason}; signals need their WFDB header (.hea): send both together"
    return Failure(label, reason).to_json()
