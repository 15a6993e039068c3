"""What a person should know before building from an archive: counts, and what is odd about it."""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from ecgmatch_dist.data.adopt.labels import FEW, Class, Labels, near_misses
from ecgmatch_dist.data.adopt.survey import Archive, Found
from ecgmatch_dist.data.databases import safe_name
from ecgmatch_dist.data.formats.leads import LEADS, PLAUSIBLE, places

SHOWN = 5
"""Labels, formats and the like in one line."""
LONG = 15.0
"""Seconds; a longer recording is more than one ECG."""


def counts(archive: Archive, found: Sequence[Found]) -> list[str]:
    """Lines about all recordings, and about those that were read."""
    good = [one for one in found if not one.problem]
    suffixes = Counter(ref.path.suffix.lower() for ref in archive.refs)
    looked = "" if len(found) == len(archive.refs) else f" (of {len(found):,} that were read)"
    lengths = Counter(f"{one.samples / one.rate:.0f} s" for one in good if "rate" not in one.unsaid)
    rates = Counter("not said" if "rate" in one.unsaid else f"{one.rate:g} Hz" for one in good)
    units = Counter("not said" if "units" in one.unsaid else " and ".join(sorted(set(one.units))) for one in good)
    leads = Counter(_leads(one) for one in good)
    files = len({ref.path for ref in archive.refs})
    return [
        f"recordings  {len(archive.refs):,} in {files:,} files: {_list(suffixes)}",
        f"readable    {len(good):,} of {len(found):,} that were read",
        f"rates       {_list(rates)}{looked}",
        f"lengths     {_list(lengths) or 'not known without a rate'}{looked}",
        f"leads       {_list(leads)}{looked}",
        f"units       {_list(units)}{looked}",
    ]


def label_counts(labels: Labels, found: Sequence[Found], recordings: int) -> list[str]:
    """Lines about labels and patients."""
    if not labels.file:
        codes = sum(bool(one.codes) for one in found)
        count = len({one.patient for one in found if one.patient})
        where = f"in the headers of {codes:,} of {len(found):,} recordings that were read" if codes else "none found"
        return [f"labels      {where}", f"patients    {f'{count:,} in the files' if count else 'not known'}"]
    what = f"column `{labels.codes}`" if labels.codes else f"{len(labels.marks)} columns of marks"
    patients = f"column `{labels.others['patient']}`" if "patient" in labels.others else "not known"
    return [
        f"labels      {labels.file.name}: column `{labels.record}` names {len(labels.named):,} of {recordings:,} recordings, "
        f"{what} holds {len(labels.words):,} different labels; {labels.empty:,} rows have none",
        f"patients    {patients}",
    ]


def doubts(
    archive: Archive, found: Sequence[Found], labels: Labels, classes: Sequence[Class], rare: Counter[str]
) -> list[str]:
    """What may be wrong, one sentence each."""
    good = [one for one in found if not one.problem]
    out = [f"{n:,} recording{'s' * (n > 1)} cannot be read: {what}" for what, n in _problems(found)]
    keys = Counter(safe_name(ref.key) for ref in archive.refs)
    if twice := [key for key, count in keys.items() if count > 1]:
        out.append(f"{len(twice):,} names belong to several recordings ({twice[0]}): use `rename`, or fewer `files`")
    strange = Counter(name for one in good for name in one.names if not places([name], {}))
    if strange:
        out.append(f"signals that are no standard lead: {_list(strange)}; if one is, name it in `lead_map`")
    if missing := [one for one in good if one.missing]:
        first = missing[0]
        out.append(
            f"{len(missing):,} recordings lack leads ({first.ref.key}: {' '.join(first.missing)}): rejected, or zeros with "
            'missing = "zero"'
        )
    if odd := [one for one in good if "units" not in one.unsaid and not _plausible(one)]:
        out.append(f"{len(odd):,} recordings have voltages unlike an ECG's ({odd[0].ref.key}): is their unit right?")
    if long := [one for one in good if "rate" not in one.unsaid and one.samples / one.rate > LONG]:
        most = max(one.samples / one.rate for one in long)
        out.append(f'{len(long):,} recordings last up to {most:.0f} s: segments = "all" uses all of each')
    return out + _unsaid_doubts(good) + _label_doubts(archive, labels, good) + _rare_doubts(classes, rare)


def _unsaid_doubts(good: Sequence[Found]) -> list[str]:
    """One recipe has one rate and one unit for all files that do not say theirs."""
    out = []
    for what, value in (("rate", "samples"), ("units", "span")):
        of_format: dict[str, list[float]] = {}
        for one in good:
            if what in one.unsaid:
                of_format.setdefault(one.format, []).append(getattr(one, value))
        middle = {name: float(np.median(some)) for name, some in of_format.items()}
        apart = 1.1 if what == "rate" else 50
        if middle and max(middle.values()) > apart * min(middle.values()):
            seen = ", ".join(f"{name} {number:,.4g}" for name, number in middle.items())
            out.append(
                f"the files that do not say their {what} differ ({value}: {seen}): adopt their folders one by one"
            )
    return out


def _label_doubts(archive: Archive, labels: Labels, good: Sequence[Found]) -> list[str]:
    out = []
    if labels.file:
        if labels.strangers:
            out.append(f"{len(labels.strangers):,} rows name no recording ({labels.strangers[0]})")
        if without := len(archive.names - labels.named):
            out.append(f"{without:,} recordings are in no row: they are unlabelled")
        if labels.empty:
            out.append(
                f'{labels.empty:,} rows without a label mean "nobody has looked"; if they mean "healthy": empty = "none"'
            )
    if not labels.words and not any(one.codes for one in good):
        out.append(
            "no labels: put a table beside the recordings, give one to `ecgmatch split --labels`, or label some with "
            "`ecgmatch label`"
        )
    if labels.file and "patient" not in labels.others and not any(one.patient for one in good):
        out.append("no patients: two recordings of one patient may be in training and test")
    return out


def _rare_doubts(classes: Sequence[Class], rare: Counter[str]) -> list[str]:
    if not rare:
        return []
    more = " (the preview has all)" if len(rare) > SHOWN else ""
    out = [
        f"too rare for a class (fewer than {FEW} recordings), so `ignored` in the scheme: {_list(rare)}{more}; a recording "
        "with no other label counts as having none of the classes"
    ]
    if alike := near_misses(rare, classes):
        rest = f" and {len(alike) - SHOWN} more" if len(alike) > SHOWN else ""
        out.append(
            f"ignored, or typos of a class: {', '.join(alike[:SHOWN])}{rest}; correct them, or move them to its `codes`"
        )
    return out


def _problems(found: Iterable[Found]) -> list[tuple[str, int]]:
    first: dict[str, str] = {}
    number: Counter[str] = Counter()
    for one in found:
        if one.problem:
            kind = one.problem.partition(":")[0]
            number[kind] += 1
            first.setdefault(kind, f"{one.problem} ({one.ref.path.name})")
    return [(first[kind], count) for kind, count in number.most_common()]


def _plausible(one: Found) -> bool:
    return PLAUSIBLE[0] <= one.span <= PLAUSIBLE[1]


def _leads(one: Found) -> str:
    if "leads" in one.unsaid:
        return "twelve without names"
    held = [lead for lead in LEADS if lead in places(one.names, {})]
    return "all twelve" if len(held) == len(LEADS) else f"{len(held)} ({' '.join(held)})"


def _list(counter: Counter[str]) -> str:
    ordered = sorted(counter.items(), key=lambda pair: (-pair[1], pair[0]))
    shown = [f"{what} {count:,}" for what, count in ordered[:SHOWN]]
    return ", ".join(shown) + (f", {len(counter) - SHOWN} more" if len(counter) > SHOWN else "")
