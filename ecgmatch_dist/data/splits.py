"""`ecgmatch split`: divide recordings into labelled, unlabelled, validation and test, by one of five protocols.

within: one database, 0.8 training, 0.1 validation, 0.1 test. mix: the same on several databases pooled. cross: one database
is the test, the others are 0.9 training and 0.1 validation. folds: one database, validation and test are published folds.
given: by your own lists. Then `ratio` of the training recordings are labelled, the others unlabelled.

Labelled, validation and test recordings are drawn from those with labels; recordings that nobody has looked at are unlabelled.
All recordings of a patient stay in one part, except that unknown recordings of a labelled patient are unlabelled.
"""

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console

from ecgmatch_dist.data.assign import Protocol
from ecgmatch_dist.data.label_check import (
    complain_about_classes,
    complain_about_codes,
    complain_about_names,
    note_only,
    tell,
)
from ecgmatch_dist.data.label_file import LabelFile, read_label_file, read_names
from ecgmatch_dist.data.labels import known, load_scheme
from ecgmatch_dist.data.make_split import make_split
from ecgmatch_dist.data.remote import scheme_of
from ecgmatch_dist.data.split_file import codes_of, labels_of
from ecgmatch_dist.data.split_summary import show
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.plain import plain_line
from ecgmatch_dist.terminal.next_step import preset_for

RATIO = {
    "within": 0.05,
    "mix": 0.01,
    "cross": 0.01,
    "folds": 0.05,
    "given": 1.0,
}  # the paper's, where it has the protocol


def databases_in(shards: str) -> list[str]:
    if scheme_of(shards):
        raise UserError(f"{shards}: the databases behind a URL cannot be listed; name them with --databases")
    found = sorted(path.parent.name for path in Path(shards).glob("*/dataset.json"))
    if not found:
        raise UserError(f"{shards}: no folder of shards in it; make them with `ecgmatch shards build`")
    return found


def databases_for(
    protocol: Protocol, shards: str, database: str, databases: Sequence[str], test: str, unlabelled: Sequence[str] = ()
) -> list[str]:
    """The databases that a protocol needs. Refuses options that belong to another protocol."""
    if protocol in ("within", "folds"):
        if not database or databases or test:
            raise UserError(f"split {protocol}: one --database NAME, no --databases, no --test")
        return sorted({database, *unlabelled})
    if protocol == "given":
        if database and databases:
            raise UserError("split given: --database or --databases, not both")
        return sorted({*([database] if database else databases or databases_in(shards)), *unlabelled})
    if database or (protocol == "mix" and test) or (protocol == "cross" and not test):
        options = "--test NAME of the database to test on" if protocol == "cross" else "no --test"
        raise UserError(f"split {protocol}: {options}; --databases for less than all, no --database")
    chosen = sorted({*(databases or databases_in(shards)), *([test] if test else []), *unlabelled})
    if len(chosen) < 2:
        raise UserError(f"split {protocol}: at least two databases, found {', '.join(chosen)} in {shards}")
    if set(chosen) <= {test, *unlabelled}:
        raise UserError(
            f"split {protocol}: every database is a test or an unlabelled one; none is left to draw labels from"
        )
    return chosen


def read_lists(store: ShardStore, lists: dict[str, Path | None], complaints: list[str]) -> dict[str, list[str]]:
    """The ids of each list of the protocol given."""
    found = {}
    for part, path in lists.items():
        if path is not None:
            found[part], strangers = read_names(path, store.ids())
            complaints += complain_about_names(f"names in {path.name} have no recording", strangers)
    return found


def check_options(
    protocol: Protocol, labelled: Path | None, validation: Path | None, name: str, seeds: int, folds: int
) -> None:
    """Refuse options that belong to another protocol, or that exclude each other. `seeds`: how many."""
    if (protocol == "given") != (labelled is not None) or (validation is not None and protocol != "given"):
        raise UserError(
            "--labelled LIST belongs to the protocol given, which needs it; --validation LIST and --test LIST too"
        )
    if name and seeds * max(folds, 1) > 1:
        raise UserError(f"--name {name}: {seeds * max(folds, 1)} splits would share one name; give one --seed")
    if folds and (folds < 2 or protocol == "folds" or validation is not None or seeds > 1):
        raise UserError(
            f"--validation-folds {folds}: at least 2, one --seed, and no published or listed validation part"
        )


def scheme_of_all(store: ShardStore) -> str:
    """The label scheme that the databases share."""
    schemes = {name: dataset.scheme for name, dataset in store.datasets.items()}
    if len(set(schemes.values())) > 1:
        raise UserError(f"the databases have different label schemes ({schemes}): choose one with --scheme")
    return next(iter(schemes.values()))


def split_shards(
    shards: str,
    protocol: Protocol,
    database: str = "",
    databases: Sequence[str] = (),
    test: str = "",
    ratio: float | None = None,
    seeds: Sequence[int] = (20,),
    scheme: str = "",
    stratified: bool = True,
    to: Path = Path("splits"),
    labels: Path | None = None,
    labelled: Path | None = None,
    validation: Path | None = None,
    unlabelled_databases: Sequence[str] = (),
    name: str = "",
    strict: bool = False,
    folds: int = 0,
) -> list[Path]:
    """Make one split per seed (and fold), save and show it. Returns the files. The arguments are those of `ecgmatch split`."""
    check_options(protocol, labelled, validation, name, len(seeds), folds)
    store = ShardStore(shards, databases_for(protocol, shards, database, databases, test, unlabelled_databases))
    scheme = scheme or scheme_of_all(store)
    complaints: list[str] = []
    file = read_label_file(labels, store.ids(), load_scheme(scheme)) if labels else None
    tests = {"test": Path(test) if test else None}
    listed = (
        read_lists(store, {"labelled": labelled, "validation": validation, **tests}, complaints) if labelled else None
    )
    is_known = known(labels_of(store, scheme, file.codes if file else None))
    if not is_known.any():
        raise UserError(nobody_has_looked(store, shards, scheme, file))
    complaints += check_labels(store, scheme, file)
    tell(complaints, strict, notes_about(store, scheme, file))
    if ratio is None:  # where some have no label, there is no reason to hide what there is
        ratio = RATIO[protocol] if is_known.all() and not unlabelled_databases else 1.0
    console = Console()
    paths = []
    for seed, fold in ((seed, fold) for seed in seeds for fold in range(max(folds, 1))):
        split = make_split(
            store,
            protocol,
            ratio,
            seed,
            scheme,
            test if protocol == "cross" else None,
            stratified=stratified,
            labels=file,
            unlabelled_databases=unlabelled_databases,
            listed=listed,
            name=name,
            fold=fold,
            folds=folds,
        )
        path = to / f"{split.name}.json"
        split.save(path)
        show(split, store, path, console)
        paths.append(path)
    return paths


def nobody_has_looked(store: ShardStore, shards: str, scheme: str, file: LabelFile | None) -> str:
    """That there is not one label, and the command that makes some."""
    command = ["ecgmatch", "label", "--shards", shards, "--scheme", scheme, "--databases", *store.databases]
    where = f" in {file.name}" if file else ""
    return f"0 of {len(store):,} recordings have a label{where}; label some: {shlex.join([*command, '--to', 'labels.csv'])}"


def check_labels(store: ShardStore, scheme: str, file: LabelFile | None) -> list[str]:
    """What a person should hear about the labels before a split is made from them."""
    rule = load_scheme(scheme)
    found = complain_about_codes(count_codes(store, file), rule, keep=not rule.drop_unlabelled)
    found += complain_about_classes(labels_of(store, scheme, file.codes if file else None), rule.short)
    if file:
        found += complain_about_names(f"rows of {file.name} have no recording", file.strangers)
    return found


def count_codes(store: ShardStore, file: LabelFile | None) -> Counter[str]:
    """Space-joined codes -> recordings."""
    values, numbers = codes_of(store, file.codes if file else None)
    counts: Counter[str] = Counter()
    for codes, n in zip(values, np.bincount(numbers, minlength=len(values)).tolist(), strict=True):
        counts[codes] += n  # two databases may have the same codes
    return counts


def notes_about(store: ShardStore, scheme: str, file: LabelFile | None) -> list[str]:
    """What is no mistake, but should be known: of the labels in the shards, the build has told it. Recordings without a label
    are unlabelled, never left out for it."""
    if not file:
        return []
    values, numbers = codes_of(store, file.codes)
    mine = np.array([name in file.codes for name in store.databases])[store.database_of(np.arange(len(store)))]
    without = np.flatnonzero(mine & np.array([not codes for codes in values])[numbers])
    found = [file.columns, *note_only(count_codes(store, file), load_scheme(scheme))]
    return found + complain_about_names(
        f"recordings have no label in {file.name} and are unlabelled", store.ids(without)
    )


def main(
    protocol: tyro.conf.Positional[Protocol],
    /,
    *,
    shards: str,
    database: str = "",
    databases: tuple[str, ...] = (),
    test: str = "",
    labels: Path | None = None,
    labelled: Path | None = None,
    validation: Path | None = None,
    unlabelled_database: tuple[str, ...] = (),
    ratio: float | None = None,
    seed: int = 20,
    seeds: tuple[int, ...] = (),
    validation_folds: int = 0,
    scheme: str = "",
    random: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    name: str = "",
    strict: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    to: Path = Path("splits"),
) -> None:
    """Make the lists of labelled, unlabelled, validation and test recordings: one file per split.

    Args:
        protocol: within (one database), mix (several pooled), cross (test on a database that is not trained on), folds (one
            database by its published folds: 9 for validation, 10 for test), or given (by your own lists).
        shards: Folder or URL with one folder of shards per database.
        database: within, folds, given: the database.
        databases: mix, cross, given: the databases; default: all in the folder.
        test: cross: the database to test on. given: a list of the test recordings; default: a tenth of the labelled list.
        labels: Label file instead of the labels in the shards: a table, or a .toml file that describes one.
        labelled: given: a list of the labelled recordings, one per row.
        validation: given: a list of the validation recordings; default: a tenth of the labelled list.
        unlabelled_database: Databases that are unlabelled as a whole, for every protocol.
        ratio: Labelled share of the training part; default: 0.05 within and folds, 0.01 mix and cross; 1 for data of which some
            have no label.
        seed: Seed of the random draw.
        seeds: Several seeds, one split each; instead of seed.
        validation_folds: So many splits with the same test part, in which the labelled recordings take turns to validate. For
            very few labels: train on each, and take the mean.
        scheme: Label scheme, a name or a .toml file; default: the one that the shards were made with.
        random: Draw at random, without stratification by label.
        name: Name of the split; default: made from the protocol, the database, the ratio and the seed.
        strict: Treat codes of no class, empty classes and names without a recording as errors.
        to: Folder of the split files.
    """
    paths = split_shards(
        shards,
        protocol,
        database,
        databases,
        test,
        ratio,
        seeds or (seed,),
        scheme,
        not random,
        to,
        labels,
        labelled,
        validation,
        unlabelled_database,
        name,
        strict,
        validation_folds,
    )
    first = databases_for(
        protocol, shards, database, databases, test if protocol != "given" else "", unlabelled_database
    )[0]
    print(plain_line(f"next        {next_command(paths[0], shards, first)}"))


def next_command(split: Path, shards: str, database: str) -> str:
    """To train on the split, by the preset that is meant for the shards of this database."""
    preset = "" if scheme_of(shards) else preset_for(Path(shards) / database)
    option = ["--preset", preset] if preset else []
    return shlex.join(["ecgmatch", "train", *option, "--split", str(split), "--shards", shards])
