"""One split from the store's labels: who is drawn, who is unlabelled, who is left out and why."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ecgmatch_dist.data import assign
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
    rule, ids = load_scheme(scheme), store.manifest["id"].to_numpy(str)
    codes = labels.codes if labels else {}
    y = labels_of(store, scheme, codes)
    is_known, database = known(y), store.manifest["database"].to_numpy(str)
    positive = np.where(y == UNKNOWN, 0, y)
    place = np.full(len(ids), assign.UNLABELLED)  # the part of each recording, or -1
    reason = np.full(len(ids), "", object)

    def leave_out(rows: Ints, why: str) -> None:
        place[rows], reason[rows] = -1, why

    if rule.drop_unlabelled:
        leave_out(np.flatnonzero((y == 0).all(1)), NO_CLASS)
    rows = np.argsort(ids, kind="stable")
    rows = rows[(place[rows] >= 0) & ~np.isin(database[rows], unlabelled_databases)]
    is_test = database[rows] == (test_database or "")
    rows, test_rows = rows[~is_test], rows[is_test]
    if protocol == "cross":
        place[test_rows] = assign.TEST
        leave_out(test_rows[~is_known[test_rows]], UNKNOWN_TEST)

    unit = units_of(store, rows, labels.patients if labels else None)
    y_unit = np.zeros((unit.max(initial=-1) + 1, y.shape[1]), np.uint8)
    np.maximum.at(y_unit, unit, positive[rows])  # a patient has the labels of all its recordings
    drawable = np.zeros(len(y_unit), bool)
    drawable[unit[is_known[rows]]] = True
    random = np.random.RandomState(seed)
    part = np.full(len(y_unit), assign.UNLABELLED)
    if protocol == "folds":
        published = folds_of(store, rows, unit, is_known[rows])
        part = assign_by_fold(y_unit, published, drawable, ratio, random, stratified)
    elif protocol == "given":
        part = assign_given(y_unit, unit, masks_of(listed or {}, ids[rows], is_known[rows]), random, stratified)
    else:
        part[drawable] = assign_parts(y_unit[drawable], protocol, ratio, random, stratified)
    if folds:
        part = rotate(part, y_unit, fold, folds, random)
    place[rows] = part[unit]
    unseen = rows[~is_known[rows]]
    place[unseen[place[unseen] == assign.LABELLED]] = assign.UNLABELLED
    leave_out(unseen[place[unseen] != assign.UNLABELLED], UNKNOWN_PATIENT)
    if (
        protocol == "given"
    ):  # the rest of a listed patient's recordings: training goes to unlabelled, the rest is left out
        named = np.isin(ids, [name for some in (listed or {}).values() for name in some])
        place[~named & (place == assign.LABELLED)] = assign.UNLABELLED
        leave_out(np.flatnonzero(~named & (place > assign.UNLABELLED)), "of a patient in the validation or test list")

    order = np.argsort(ids, kind="stable")
    rows_of = {name: order[place[order] == i] for i, name in enumerate(PARTS)}
    check_filled(rows_of, ratio, int((place >= 0).sum()))
    parts = {part: ids[some].tolist() for part, some in rows_of.items()}
    found = {part: y[some] for part, some in rows_of.items()}
    check_annotated(found["labelled"], rule.short)
    hidden = unannotated(found, rule.short)
    needs_labels = bool(labels or hidden or protocol == "given" or unlabelled_databases or scheme.endswith(".toml"))
    why = {str(w): int(n) for w, n in zip(*np.unique(reason[place < 0].astype(str), return_counts=True), strict=True)}
    split = Split(
        name=name
        or split_name(
            protocol, store.databases, test_database, ratio, seed + fold, stratified, unlabelled_databases, folds
        ),
        protocol=protocol,
        databases=tuple(sorted(store.databases)),
        test_database=test_database,
        ratio=ratio,
        seed=seed + fold,
        scheme=scheme,
        stratified=stratified,
        parts=parts,
        counts={part: count(some, rule.short) for part, some in found.items()},
        manifests={name: store.datasets[name].manifest_sha256 for name in sorted(store.databases)},
        format=2 if needs_labels else 1,
        label_file=labels.name if labels else "",
        label_file_sha256=labels.sha256 if labels else "",
        codes=codes,
        labels_sha256=hash_labels(parts, found) if needs_labels else "",
        unannotated=hidden,
        left_out=why if needs_labels else {},
    ).sealed()
    split.check_parts(split.name)
    return split


def masks_of(listed: Mapping[str, Sequence[str]], ids: NDArray[np.str_], is_known: Mask) -> dict[str, Mask]:
    """Part -> the rows [n] that its list names. Refuses recordings in two lists, and those that have no label."""
    masks: dict[str, Mask] = {}
    for part, names in listed.items():
        masks[part] = np.isin(ids, names)
        for other, mask in masks.items():
            if other != part and (mask & masks[part]).any():
                raise UserError(f"split given: {ids[mask & masks[part]][0]} is in the lists {other} and {part}")
        if (masks[part] & ~is_known).any():
            unknown = ids[masks[part] & ~is_known]
            raise UserError(
                f"split given: {len(unknown):,} recordings of the {part} list have no label ({unknown[0]}, ...); "
                "give them with --labels, or take them from the list"
            )
    return masks


def check_filled(rows_of: Mapping[str, Ints], ratio: float, total: int) -> None:
    empty = [name for name, some in rows_of.items() if not len(some) and (name, ratio) != ("unlabelled", 1)]
    if empty:
        raise UserError(f"the {empty[0]} part is empty: {total:,} recordings are too few at ratio {ratio:g}")


def check_annotated(labels: NDArray[np.uint8], short: Sequence[str]) -> None:
    """Labels [N_B, C] of the labelled part: a class that nobody has looked for there cannot be learnt."""
    if unseen := [name for c, name in enumerate(short) if (labels[:, c] == UNKNOWN).all()]:
        raise UserError(
            f"no labelled recording says anything about {', '.join(unseen)}: draw more (--ratio), or use a scheme "
            "without it"
        )


def split_name(
    protocol: str,
    databases: Sequence[str],
    test: str | None,
    ratio: float,
    seed: int,
    stratified: bool,
    unlabelled: Sequence[str] = (),
    folds: int = 0,
) -> str:
    """For example cross-g12ec@0.01.s20."""
    own = [name for name in databases if name not in unlabelled]
    of = {"within": f"-{own[0]}", "folds": f"-{own[0]}", "mix": "", "cross": f"-{test}", "given": f"-{own[0]}"}[
        protocol
    ]
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
