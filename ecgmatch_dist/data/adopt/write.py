"""The recipe and the label scheme of an archive as TOML, with EDIT beside what was guessed."""

import glob
import json
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ecgmatch_dist.data.adopt.labels import Class, Labels
from ecgmatch_dist.data.adopt.survey import Archive, Found
from ecgmatch_dist.data.formats.leads import LEADS, PLAUSIBLE

RATES = (100, 125, 128, 200, 240, 250, 256, 300, 360, 400, 500, 512, 600, 1000, 1024, 2000)
EDIT = "EDIT"


def recipe_text(name: str, archive: Archive, found: Sequence[Found], labels: Labels, scheme: str) -> str:
    """The recipe. `scheme`: name of a known scheme, or of the file beside it."""
    lines = [
        f"# Written by `ecgmatch adopt`. What is marked {EDIT} was guessed. shards/example_own.toml explains every key.",
        f"database = {_text(name)}",
        f"files = {_texts(_patterns(archive))}",
        f"scheme = {_text(scheme)}",
        'unlabelled = "keep"   # recordings without a label are unlabelled training data; "drop" leaves them out',
        *_signals(found),
        "",
        "[labels]",
        *_labels(archive, labels),
    ]
    return "\n".join(lines) + "\n"


def _patterns(archive: Archive) -> list[str]:
    """The folders of recordings by suffix. Many folders make one pattern for all of them."""
    found = sorted({(ref.path.parent, ref.path.suffix) for ref in archive.refs})
    suffixes = sorted({suffix for _, suffix in found})
    if len(found) > 8:
        return [f"**/*{suffix}" for suffix in suffixes]
    folders = ((parent.relative_to(archive.folder).as_posix(), suffix) for parent, suffix in found)
    return [f"{'' if folder == '.' else _literally(folder) + '/'}*{suffix}" for folder, suffix in folders]


def _literally(folder: str) -> str:
    """A pattern for this folder: brackets and stars in its name stand for themselves. Any sign stands for one that no TOML
    file can hold."""
    return re.sub(r"[\x7f\ud800-\udfff]", "?", glob.escape(folder))


def _signals(found: Sequence[Found]) -> list[str]:
    """The table [signals], if some files do not say all."""
    unsaid = {
        what: [one for one in found if what in one.unsaid and not one.problem] for what in ("rate", "units", "leads")
    }
    if not any(unsaid.values()):
        return []
    lines = ["", "[signals]"]
    if some := unsaid["rate"]:
        lines.append(f"rate = {guess_rate(found)}   # {EDIT}: samples per second of {_which(some)}")
    if some := unsaid["units"]:
        lines.append(f"unit = {_text(guess_unit(some))}   # {EDIT}: guessed from the voltages of {_which(some)}")
    if some := unsaid["leads"]:
        lines.append(f"leads = {_texts(LEADS)}   # {EDIT}: the order of the columns of {_which(some)}")
    return lines


def guess_rate(found: Sequence[Found]) -> int:
    """The usual rate at which the recordings without one last as long as the others, or ten seconds."""
    good = [one for one in found if not one.problem]
    seconds = [one.samples / one.rate for one in good if "rate" not in one.unsaid] or [10.0]
    rate = float(np.median([one.samples for one in good if "rate" in one.unsaid])) / float(np.median(seconds))
    nearest = min(RATES, key=lambda usual: abs(usual / rate - 1))
    return nearest if abs(nearest / rate - 1) < 0.1 else 500


def guess_unit(found: Sequence[Found]) -> str:
    """mV if the values are like an ECG's in mV, otherwise uV."""
    return "mV" if np.median([one.span for one in found]) <= PLAUSIBLE[1] else "uV"


def _which(found: Sequence[Found]) -> str:
    return " and ".join(sorted(Counter(one.format for one in found))) + " files"


def _labels(archive: Archive, labels: Labels) -> list[str]:
    if not labels.file:
        return ['source = "header"']
    roles = {"record": labels.record, **({"codes": labels.codes} if labels.codes else {}), **labels.others}
    why = {"record": "names recordings", "codes": "looks like labels"}
    empty = 'empty = "unknown"   # '
    if labels.empty:
        empty += f"{EDIT}: {labels.empty:,} rows without a label, guessed: "
    return [
        'source = "csv"',
        f"file = {_text(labels.file.relative_to(archive.folder).as_posix())}",
        *(f"{role} = {_text(column)}   # {EDIT}: {why.get(role, 'by its name')}" for role, column in roles.items()),
        empty + 'nobody has looked; "none": somebody has, and found nothing',
    ]


def scheme_text(name: str, classes: Sequence[Class], rare: Sequence[str]) -> str:
    """The label scheme: one class per frequent label."""
    lines = [
        f"# Written by `ecgmatch adopt`: one class per label. What is marked {EDIT} was guessed.",
        "# Join classes by moving codes from one to another.",
        f"name = {_text(name)}",
        'unlabelled = "keep"   # a label of no class means certainly none of them; "drop" leaves the recording out',
        f"ignored = {_texts(rare)}   # too rare for a class of their own",
    ]
    for one in classes:
        lines += [
            "",
            "[[class]]",
            f"name = {_text(one.name)}",
            f"short = {_text(one.short)}",
            f"codes = {_texts([one.name])}",
        ]
        if one.only:
            lines.append(f"only = true   # {EDIT}: guessed from its name; beside another label it does not count")
        lines[-1] += f"; {one.count:,} recordings" if one.only else f"   # {one.count:,} recordings"
    return "\n".join(lines) + "\n"


def _text(word: str) -> str:
    return json.dumps(word, ensure_ascii=False)  # a JSON string is a TOML string


def _texts(words: Sequence[str]) -> str:
    return "[" + ", ".join(map(_text, words)) + "]"
