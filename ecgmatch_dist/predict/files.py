"""What a user names -> the recordings: files, folders with everything below them, and lists of both (`@list.txt`)."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from ecgmatch_dist.data.formats.read import find, stem
from ecgmatch_dist.data.formats.recording import RecordRef
from ecgmatch_dist.errors import UserError

SILENT = (".csv", ".tsv", ".txt", ".npy")
"""Files that do not say their rate. In a folder they may be anything: tables of labels, lists, notes."""


def find_files(paths: Iterable[str | Path], rate: float | None = None) -> list[RecordRef]:
    """All recordings, in the order of `paths`, each once; those of a folder sorted by path. A path that is not there is a
    recording, whose reading tells so. CSV and NPY files inside a folder count if their `rate` is known."""
    found: dict[tuple[Path, int | None], RecordRef] = {}
    for path in paths:
        for ref in _listed(str(path)) if str(path).startswith("@") else _recordings(Path(path), rate):
            found.setdefault((ref.path, ref.item), ref)
    if not found:
        silent = " (CSV and NPY files in a folder count if their rate is given, as in --rate 500)" * (rate is None)
        raise UserError(
            f"no recordings in {', '.join(map(str, paths)) or 'nothing'}: name files or folders of ECGs{silent}"
        )
    return list(found.values())


def _recordings(path: Path, rate: float | None) -> Iterator[RecordRef]:
    if path.is_dir():
        yield from (ref for ref in find(path) if rate is not None or ref.path.suffix.lower() not in SILENT)
    elif path.exists():
        yield from find(path)
    else:
        yield RecordRef(stem(path), path)


def _listed(name: str) -> Iterator[RecordRef]:
    """`@list.txt`: one path per line, relative to the list's folder. An empty line counts for nothing."""
    path = Path(name[1:])
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a list of recordings, one path per line ({error})") from None
    for line in lines:
        if line.strip():
            yield from _recordings(path.parent / line.strip(), rate=1)
