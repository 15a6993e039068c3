"""Which unit (a patient, or a recording without one) belongs to which part of a split. Only units with labels are drawn."""

from collections.abc import Mapping
from typing import Literal

import numpy as np
from iterstrat.ml_stratifiers import MultilabelStratifiedKFold
from numpy.typing import NDArray

from ecgmatch_dist.data.segments import recording_of
from ecgmatch_dist.data.split_file import PARTS
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.data.stratify import draw_stratified
from ecgmatch_dist.data.table import Table
from ecgmatch_dist.errors import UserError

Protocol = Literal["within", "mix", "cross", "folds", "given"]
VALIDATION_FOLD, TEST_FOLD = "9", "10"  # as PTB-XL's authors recommend
LABELLED, UNLABELLED, VALIDATION, TEST = range(len(PARTS))
Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]


def draw(y: NDArray[np.uint8], fraction: float, random: np.random.RandomState, stratified: bool) -> Mask:
    """Draw a `fraction` of n units with labels y [n, C]: True [n] where drawn. Stratified: multi-label iterative
    stratification."""
    n = len(y)
    if fraction == 1 or n < 2:
        return np.full(n, fraction == 1)
    if stratified:
        y = np.column_stack([y, 1 - y]) if y.shape[1] == 1 else y  # iterative stratification takes no single column
        return draw_stratified(y, fraction, random)
    drawn = np.zeros(n, bool)
    drawn[random.permutation(n)[: round(n * fraction)]] = True
    return drawn


def draw_some(y: NDArray[np.uint8], fraction: float, random: np.random.RandomState, stratified: bool) -> Mask:
    """Like `draw`, but at least one unit of two or more on each side: with twenty labels there is still a validation part."""
    drawn = draw(y, fraction, random, stratified)
    if len(y) > 1 and drawn.all() | ~drawn.any():
        one = random.randint(len(y))
        drawn[one] = ~drawn[one]
    return drawn


def units_of(store: ShardStore, rows: Ints, patients: Mapping[str, str] | None = None) -> Ints:
    """The unit 0..u-1 of each row [n]: its patient, or the recording itself where no patient is known, which come first.
    `rows`: in the order of their ids; `patients`: id -> patient, where another source than the manifest knows it."""
    unit = recordings_of(store, rows)
    names = sorted(store.databases)
    for i, here, own in store.by_table(rows):
        number, nobody = patients_of(store.tables[i], store.databases[i], patients or {})
        patient = number[own].astype(np.int64)
        first = len(rows) + 2**32 * names.index(store.databases[i])
        unit[here] = np.where(patient == nobody, unit[here], first + patient)
    return np.unique(unit, return_inverse=True)[1]


def all_units(store: ShardStore) -> Ints:
    """The unit of each recording of a store [N], in the store's own order."""
    order = store.order()
    units = np.empty(len(order), np.int64)
    units[order] = units_of(store, order)
    return units


def patients_of(table: Table, database: str, patients: Mapping[str, str]) -> tuple[NDArray[np.integer], int]:
    """The number of each row's patient, in the order of their names [n], and the number of no patient."""
    told = {name[len(database) + 1 :]: patient for name, patient in patients.items() if name.startswith(f"{database}/")}
    if not told:
        return table.codes("patient"), -1 if table.arrays["patient.values"][:1].any() else 0
    values = table.values("patient")
    number = {name: n for n, name in enumerate(sorted({"", *values, *told.values()}))}
    numbers = np.array([number[name] for name in values])[table.codes("patient")]
    numbers[table.find(list(told))] = [number[name] for name in told.values()]
    return numbers, 0


def recordings_of(store: ShardStore, rows: Ints) -> Ints:
    """The number of each row's recording, in the order of their ids [n]: pieces of one recording have the same number."""
    if not any(table.has_segments for table in store.tables):
        return np.arange(len(rows))
    return np.unique([recording_of(name) for name in store.ids(rows)], return_inverse=True)[1]


def assign_parts(
    y: NDArray[np.uint8], protocol: Protocol, ratio: float, random: np.random.RandomState, stratified: bool
) -> Ints:
    """Units with labels y [u, C] -> the part of each, an index of PARTS [u]. cross leaves the test part empty."""
    part = np.full(len(y), UNLABELLED)
    training, held_out = divide(y, np.arange(len(y)), 0.1 if protocol == "cross" else 0.2, random, stratified)
    part[held_out] = VALIDATION
    if protocol != "cross":
        part[divide(y, held_out, 0.5, random, stratified)[1]] = TEST
    part[training[draw(y[training], ratio, random, stratified)]] = LABELLED
    return part


def divide(
    y: NDArray[np.uint8], units: Ints, fraction: float, random: np.random.RandomState, stratified: bool
) -> tuple[Ints, Ints]:
    """Units -> those that stay, and the drawn `fraction`."""
    drawn = draw_some(y[units], fraction, random, stratified)
    return units[~drawn], units[drawn]


def rotate(part: Ints, y: NDArray[np.uint8], fold: int, folds: int, random: np.random.RandomState) -> Ints:
    """Another validation part: fold `fold` of the labelled and validation units together. Over all folds, every one of them
    validates once; the test part stays."""
    pool = np.flatnonzero((part == LABELLED) | (part == VALIDATION))
    if len(pool) < 2 * folds:
        raise UserError(
            f"--validation-folds {folds}: {len(pool)} labelled patients or recordings are too few; give fewer"
        )
    y = np.column_stack([y[pool], 1 - y[pool]]) if y.shape[1] == 1 else y[pool]
    splitter = MultilabelStratifiedKFold(n_splits=folds, shuffle=True, random_state=random)
    rotated = part.copy()
    rotated[pool] = LABELLED
    rotated[pool[list(splitter.split(np.zeros(len(pool)), y))[fold][1]]] = VALIDATION
    return rotated


def folds_of(store: ShardStore, rows: Ints, unit: Ints, known: Mask) -> NDArray[np.str_]:
    """The published fold of each unit [u]; empty for a unit without any `known` recording that has none."""
    values, numbers = store.coded("fold")
    fold = np.array(values, str)[numbers[rows]]
    if (missing := (fold == "") & known).any():
        name = store.ids(rows[missing][:1])[0]
        raise UserError(f"split folds: {name} has no fold; only databases that publish folds can be split by them")
    fold_of_unit = np.zeros(unit.max(initial=-1) + 1, fold.dtype)
    fold_of_unit[unit[fold != ""]] = fold[fold != ""]
    if ((fold_of_unit[unit] != fold) & (fold != "")).any():
        raise UserError("split folds: recordings of one patient are in several folds; use the protocol within")
    return fold_of_unit


def assign_by_fold(
    y: NDArray[np.uint8],
    fold: NDArray[np.str_],
    drawable: Mask,
    ratio: float,
    random: np.random.RandomState,
    stratified: bool,
) -> Ints:
    """Like `assign_parts`, but validation and test are published folds, the same for every seed. `drawable` [u]: the units
    with labels."""
    part = np.full(len(y), UNLABELLED)
    part[fold == VALIDATION_FOLD], part[fold == TEST_FOLD] = VALIDATION, TEST
    training = np.flatnonzero((part == UNLABELLED) & drawable)
    part[training[draw(y[training], ratio, random, stratified)]] = LABELLED
    return part


def assign_given(
    y: NDArray[np.uint8],
    unit: Ints,
    listed: dict[str, Mask],
    random: np.random.RandomState,
    stratified: bool,
) -> Ints:
    """Units by lists of recordings. `listed`: part -> rows [n] that a list names. A validation or test part without a list is
    drawn from the labelled list, a tenth of it each."""
    part = np.full(len(y), UNLABELLED)
    for name, rows in listed.items():
        part[unit[rows]] = PARTS.index(name)
    for name, rows in listed.items():
        if (part[unit[rows]] != PARTS.index(name)).any():
            raise UserError(
                f"split given: a patient of the {name} list is in another list too; patients stay in one part"
            )
    missing = [name for name in ("validation", "test") if name not in listed]
    for i, name in enumerate(missing):
        labelled = np.flatnonzero(part == LABELLED)
        fraction = 0.1 / (1 - 0.1 * i)  # the second tenth is of what the first has left
        part[divide(y, labelled, fraction, random, stratified)[1]] = PARTS.index(name)
    return part
