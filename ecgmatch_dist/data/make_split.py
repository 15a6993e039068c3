"""One split from the store's labels: who is drawn, who is unlabelled, who is left out and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data import assign, split_file
from ecgmatch_dist.data.assign import (
    Ints,
    Mask,
    Protocol,
    assign_by_fold,
    assign_given,
    assign_parts,
    folds_of,
    rotate,
    units_of,
)
from ecgmatch_dist.data.label_file import LabelFile
from ecgmatch_dist.data.labels import UNKNOWN, known, load_scheme
from ecgmatch_dist.data.split_file import PARTS, Split, hash_labels, labels_of
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError

NO_CLASS = 'no class of the scheme (unlabelled = "keep" in the scheme counts them as certainly none)'
UNKNOWN_TEST = "unknown, in the database to test on"
UNKNOWN_PATIENT = "unknown, of a patient in validation or test"
LISTED_PATIENT = "of a patient in the validation or test list"
SHARED = "labelled, validation and test parts"


def make_split(
    store: ShardStore,
    protocol: Protocol,
    ratio: float,
    seed: int,
    scheme: str,
    test_database: str | None = None,
    stratified: bool = True,
    *,
    labels: LabelFile | None = None,
    unlabelled_databases: Sequence[str] = (),
    listed: Mapping[str, Sequence[str]] | None = None,
    name: str = "",
    fold: int = 0,
    folds: int = 0,
) -> Split:
    """The split of the store's databases. The same shards give the same bytes, in any order of the databases.

    `labels`: instead of the shards' codes; `unlabelled_databases`: in the unlabelled part as a whole; `listed`: protocol given,
    the ids of its lists by part; `folds`: number `fold` of so many splits whose validation parts take turns; its
    seed is `seed + fold`."""
    if not 0 < ratio <= 1:
        raise UserError(f"ratio {ratio:g}: the labelled share of the training part, above 0 and at most 1")
    rule, codes = load_scheme(scheme), labels.codes if labels else {}
    y = labels_of(store, scheme, codes)
    is_known, order, places = known(y), store.order(), Places(len(store))
    if rule.drop_unlabelled:
        places.leave_out(np.flatnonzero((y == 0).all(1)), NO_CLASS)
    apart = test_database if protocol == "cross" else None
    rows = set_aside(places, store, order, is_known, apart, unlabelled_databases)

    # draw units: patients, or recordings without one
    unit = units_of(store, rows, labels.patients if labels else None)
    y_unit = labels_of_units(y, rows, unit)
    random = np.random.RandomState(seed)
    rows_of_list = {name: store.rows(names) for name, names in (listed or {}).items()}
    if protocol == "folds":
        published = folds_of(store, rows, unit, is_known[rows])
        part = assign_by_fold(y_unit, published, has_known(unit, is_known[rows]), ratio, random, stratified)
    elif protocol == "given":
        part = assign_given(y_unit, unit, masks_of(store, rows_of_list, rows, is_known), random, stratified)
    else:
        part, drawable = np.full(len(y_unit), assign.UNLABELLED), has_known(unit, is_known[rows])
        part[drawable] = assign_parts(y_unit[drawable], protocol, ratio, random, stratified)
    if folds:
        part = rotate(part, y_unit, fold, folds, random)

    places.part[rows] = part[unit]
    hide_unknown(places, rows[~is_known[rows]])
    if protocol == "given":
        keep_to_the_lists(places, np.concatenate(list(rows_of_list.values())))
    if not name:
        own = [one for one in store.databases if one not in unlabelled_databases]
        name = split_name(protocol, own, test_database, ratio, seed + fold, stratified, unlabelled_databases, folds)
    needs_labels = labels or protocol == "given" or unlabelled_databases or scheme.endswith(".toml")
    how = Drawn(name, protocol, test_database, ratio, seed + fold, scheme, stratified, labels)
    own_databases = np.array([one not in (*unlabelled_databases, apart) for one in store.databases])
    own_known = is_known & own_databases[store.database_of(np.arange(len(store)))]
    check_filled(places, how, own_known, int(has_known(unit, is_known[rows]).sum()))
    return describe(how, store, order, places, y, bool(needs_labels))


def set_aside(
    places: "Places",
    store: ShardStore,
    order: Ints,
    is_known: Mask,
    test_database: str | None,
    unlabelled_databases: Sequence[str],
) -> Ints:
    """Put the test database of cross into its part, and leave databases that are unlabelled as a whole where they are.
    Returns the rows that are left to be drawn, in `order`."""
    database = store.database_of(order)
    whole = [i for i, name in enumerate(store.databases) if name in unlabelled_databases]
    candidates = (places.part[order] >= 0) & ~np.isin(database, whole)
    is_test = np.array([name == test_database for name in store.databases])[database]
    test_rows = order[candidates & is_test]
    places.part[test_rows] = assign.TEST
    places.leave_out(test_rows[~is_known[test_rows]], UNKNOWN_TEST)
    left: Ints = order[candidates & ~is_test]
    return left


def has_known(unit: Ints, is_known: Mask) -> Mask:
    """Which units [u] have a recording with labels; of the recordings [n], `unit` and whether each has labels."""
    out = np.zeros(int(unit.max(initial=-1)) + 1, bool)
    out[unit[is_known]] = True
    return out


def hide_unknown(places: "Places", unknown: Ints) -> None:
    """Recordings that nobody has looked at are unlabelled, or left out if their patient validates or tests."""
    places.part[unknown[places.part[unknown] == assign.LABELLED]] = assign.UNLABELLED
    places.leave_out(unknown[places.part[unknown] != assign.UNLABELLED], UNKNOWN_PATIENT)


def keep_to_the_lists(places: "Places", listed: Ints) -> None:
    """Other recordings of listed patients: those of the labelled list are unlabelled, the rest is left out."""
    named = np.zeros(len(places.part), bool)
    named[listed] = True
    places.part[~named & (places.part == assign.LABELLED)] = assign.UNLABELLED
    places.leave_out(np.flatnonzero(~named & (places.part > assign.UNLABELLED)), LISTED_PATIENT)


@dataclass(frozen=True)
class Drawn:
    """How a split was drawn, as its file tells."""

    name: str
    protocol: Protocol
    test_database: str | None
    ratio: float
    seed: int
    scheme: str
    stratified: bool
    labels: LabelFile | None


def describe(
    how: Drawn, store: ShardStore, order: Ints, places: "Places", y: NDArray[np.uint8], needs_labels: bool
) -> Split:
    """The split as a file holds it: names or letters of its parts, counts, hashes. Refuses classes without any label in the
    labelled part. `needs_labels`: its labels are not those that the shards alone give."""
    rows_of = {name: order[places.part[order] == i] for i, name in enumerate(PARTS)}
    short, found = load_scheme(how.scheme).short, {part: y[some] for part, some in rows_of.items()}
    check_annotated(found["labelled"], short)
    hidden, large = unannotated(found, short), len(store) > split_file.MOST_NAMES
    needs_labels = bool(needs_labels or hidden or large)
    parts = {} if large else {part: store.ids(some) for part, some in rows_of.items()}
    split = Split(
        name=how.name,
        protocol=how.protocol,
        databases=tuple(sorted(store.databases)),
        test_database=how.test_database,
        ratio=how.ratio,
        seed=how.seed,
        scheme=how.scheme,
        stratified=how.stratified,
        parts=parts,
        counts={part: count(some, short) for part, some in found.items()},
        manifests={name: store.datasets[name].manifest_sha256 for name in sorted(store.databases)},
        format=3 if large else 2 if needs_labels else 1,
        label_file=how.labels.name if how.labels else "",
        label_file_sha256=how.labels.sha256 if how.labels else "",
        codes=how.labels.codes if how.labels else {},
        labels_sha256=hash_labels(parts, found) if needs_labels else "",
        unannotated=hidden,
        left_out=places.left_out() if needs_labels else {},
        letters=places.letters(store) if large else {},
    ).sealed()
    split.check_parts(split.name)
    return split


class Places:
    """The part of each recording of the store: an index of PARTS, or -1, and why it has none."""

    def __init__(self, n: int) -> None:
        self.part = np.full(n, assign.UNLABELLED, np.int8)
        self._reason = np.zeros(n, np.uint8)
        self._reasons: list[str] = []

    def leave_out(self, rows: Ints, reason: str) -> None:
        self.part[rows], self._reason[rows] = -1, len(self._reasons)
        self._reasons.append(reason)

    def left_out(self) -> dict[str, int]:
        """Reason -> recordings."""
        counts = np.bincount(self._reason[self.part < 0], minlength=len(self._reasons)).tolist()
        return {reason: n for reason, n in sorted(zip(self._reasons, counts, strict=True)) if n}

    def letters(self, store: ShardStore) -> dict[str, str]:
        """Of each database, as a split of format 3 holds them."""
        every = np.frombuffer(split_file.LETTERS.encode(), np.uint8)[self.part]  # -1 is the last one
        return {
            name: every[start:stop].tobytes().decode()
            for name, start, stop in sorted(zip(store.databases, store.starts[:-1], store.starts[1:], strict=True))
        }


def labels_of_units(y: NDArray[np.uint8], rows: Ints, unit: Ints) -> NDArray[np.uint8]:
    """Labels y [N, C] of recordings -> [u, C] of units: a patient has the labels of all its recordings, and unknown is none."""
    units = int(unit.max(initial=-1)) + 1
    columns = [np.bincount(unit[y[rows, c] == 1], minlength=units) > 0 for c in range(y.shape[1])]
    return np.column_stack(columns).astype(np.uint8)


def masks_of(store: ShardStore, listed: Mapping[str, Ints], rows: Ints, is_known: Mask) -> dict[str, Mask]:
    """Part -> which of the `rows` [n] its list names. Refuses recordings in two lists, and those that have no label."""
    masks: dict[str, Mask] = {}
    for part, some in listed.items():
        masks[part] = np.isin(rows, some)
        for other, mask in masks.items():
            if other != part and (both := rows[mask & masks[part]]).size:
                raise UserError(f"split given: {store.ids(both[:1])[0]} is in the lists {other} and {part}")
        if (unknown := rows[masks[part] & ~is_known[rows]]).size:
            raise UserError(
                f"split given: {len(unknown):,} recordings of the {part} list have no label "
                f"({store.ids(unknown[:1])[0]}, ...); give them with --labels, or take them from the list"
            )
    return masks


def check_filled(places: "Places", how: Drawn, is_known: Mask, units: int) -> None:
    """Refuse an empty part, and say why it is empty. `is_known` [N]: which recordings have a label that may be drawn; `units`:
    of how many patients they are. At ratio 1, nothing is unlabelled where all have one."""
    sizes = {name: int((places.part == i).sum()) for i, name in enumerate(PARTS)}
    empty = next((name for name, n in sizes.items() if not n and (name, how.ratio) != ("unlabelled", 1)), "")
    if not empty:
        return
    total, labelled = len(is_known), int(is_known.sum())
    usable = int((is_known & (places.part >= 0)).sum())
    of = f" (they are of {units:,} patient{'s' * (units != 1)})" if units < usable else ""
    if empty == "test" and how.protocol == "cross":
        why = f"no recording of {how.test_database} has a label"
    elif how.protocol == "cross" and not labelled:
        why = f"no recording has a label but those of {how.test_database}, the database to test on"
    elif labelled and not usable:
        why = f"{labelled:,} recordings have a label, none of them a class of {how.scheme}; give another --scheme"
    elif empty in ("validation", "test") and how.protocol == "folds":
        why = (
            f"no recording of fold {assign.VALIDATION_FOLD if empty == 'validation' else assign.TEST_FOLD} has a label"
        )
    elif empty in ("labelled", "unlabelled") and how.protocol != "given" and how.ratio < 1:
        why = f"{usable:,} recordings with a label{of} are too few at ratio {how.ratio:g}"
    elif how.protocol == "given":
        listed = sum(n for name, n in sizes.items() if name != "unlabelled")
        why = f"the lists name {listed:,} recordings with a label: too few to share among {SHARED}"
    else:
        why = f"{usable:,} of {total:,} recordings have a label{of}: too few to share among {SHARED}"
    raise UserError(f"the {empty} part is empty: {why}")


def check_annotated(labels: NDArray[np.uint8], short: Sequence[str]) -> None:
    """Labels [N_B, C] of the labelled part: a class that nobody has looked for there cannot be learnt."""
    if unseen := [name for c, name in enumerate(short) if (labels[:, c] == UNKNOWN).all()]:
        raise UserError(
            f"no labelled recording says anything about {', '.join(unseen)}: draw more (--ratio), or use a scheme "
            "without it"
        )


def split_name(
    protocol: str,
    own: Sequence[str],
    test: str | None,
    ratio: float,
    seed: int,
    stratified: bool,
    unlabelled: Sequence[str],
    folds: int,
) -> str:
    """For example cross-g12ec@0.01.s20. `own`: the databases that labels are drawn from."""
    of = {"mix": "", "cross": f"-{test}"}.get(protocol, f"-{own[0]}")
    more = "".join(f"+{name}" for name in sorted(unlabelled))
    return f"{protocol}{of}{more}{'' if stratified else '-random'}{f'-{folds}fold' if folds else ''}@{ratio:g}.s{seed}"


def count(y: NDArray[np.uint8], short: Sequence[str]) -> dict[str, int]:
    """Recordings with labels y [n, C], in total and with each class."""
    return {"recordings": len(y), **{name: int(k) for name, k in zip(short, (y == 1).sum(0), strict=True)}}


def unannotated(labels: Mapping[str, NDArray[np.uint8]], short: Sequence[str]) -> dict[str, dict[str, int]]:
    """Part -> class -> recordings in which nobody has looked for it; only where there are any."""
    counts = {
        part: {name: int(k) for name, k in zip(short, (y == UNKNOWN).sum(0), strict=True) if k}
        for part, y in labels.items()
    }
    return {part: of_part for part, of_part in counts.items() if of_part}
