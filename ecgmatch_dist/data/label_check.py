"""What a person should hear about labels: codes of no class, classes without recordings, names that fit nothing."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data.labels import UNKNOWN, LabelScheme
from ecgmatch_dist.errors import UserError

SHOWN = 8
"""Codes or names in one line."""


def codes_without_class(codes: Mapping[str, int], scheme: LabelScheme) -> tuple[Counter[str], Counter[str]]:
    """Space-joined codes, with the number of recordings that have them -> the codes that match no class, and those that the
    scheme ignores on purpose, with their numbers of recordings."""
    found: Counter[str] = Counter()
    for joined, n in codes.items():
        found.update({code: n for code in {*joined.split()} if n and scheme.has_no_class(code)})
    ignored = Counter({code: n for code, n in found.items() if scheme.is_ignored(code)})
    return found - ignored, ignored


def complain_about_codes(codes: Mapping[str, int], scheme: LabelScheme, keep: bool) -> list[str]:
    """Codes of no class, among space-joined codes with their numbers of recordings. `keep`: recordings without a class stay and
    are certainly none of them."""
    stray, _ = codes_without_class(codes, scheme)
    if not stray:
        return []
    found = f"codes that match no class: {some_codes(stray)}; add them to `codes` of a class, or to `ignored`"
    nothing_else = [
        joined for joined in codes if {*joined.split()} & {*stray} and not scheme.encode(joined.split()).any()
    ]
    if n := sum(codes[joined] for joined in nothing_else):
        become = "count as having none of the classes" if keep else "are left out, being of no class"
        found += f"; until then, {n:,} recordings {become}"
    return [found]


def note_only(codes: Mapping[str, int], scheme: LabelScheme) -> list[str]:
    """How many recordings have the class that must stand alone beside another label, so that it does not count."""
    if scheme.normal is None:
        return []
    named = {joined: n for joined, n in codes.items() if scheme.says_normal(joined.split())}
    beside = sum(n for joined, n in named.items() if not scheme.encode(joined.split())[scheme.normal])
    name, total = scheme.short[scheme.normal], sum(named.values())
    return (
        [f"{name}: {beside:,} of {total:,} stand beside other labels and do not count (only = true)"] if beside else []
    )


def some_codes(codes: Counter[str]) -> str:
    """The most frequent ones with their numbers of recordings."""
    some = ", ".join(f"{code} {count:,}" for code, count in codes.most_common(SHOWN))
    return some + (f" and {len(codes) - SHOWN} more" if len(codes) > SHOWN else "")


def complain_about_classes(labels: NDArray[np.uint8], short: Sequence[str]) -> list[str]:
    """Classes that no recording has, among labels [n, C]."""
    empty = [name for c, name in enumerate(short) if not (labels[:, c] == 1).any()]
    unseen = [name for c, name in enumerate(short) if (labels[:, c] == UNKNOWN).all()]
    out = []
    if absent := [name for name in empty if name not in unseen]:
        out.append(f"no recording is {', '.join(absent)}")
    if unseen:
        out.append(f"nobody has looked for {', '.join(unseen)} in any recording")
    return out


def complain_about_names(what: str, names: Sequence[str]) -> list[str]:
    """`what` with the number of names and a few of them."""
    if not names:
        return []
    more = ", ..." if len(names) > SHOWN else ""
    return [f"{len(names):,} {what}: {', '.join(names[:SHOWN])}{more}"]


def tell(complaints: Sequence[str], strict: bool, notes: Sequence[str] = ()) -> None:
    """Print the complaints as warnings; with `strict`, refuse. `notes` are printed only: they are as somebody meant them."""
    if complaints and strict:
        raise UserError(f"{'; '.join(complaints)} (--strict)")
    for complaint in complaints:
        print(f"warning: {complaint}")
    for note in notes:
        print(f"note: {note}")
