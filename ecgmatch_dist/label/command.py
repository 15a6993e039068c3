"""`ecgmatch label`: label ECGs of shards on a page, the most useful ones first."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table as ScreenTable

from ecgmatch_dist.data.labels import load_scheme
from ecgmatch_dist.data.remote import scheme_of
from ecgmatch_dist.data.splits import databases_in
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.lock import only_one
from ecgmatch_dist.files.plain import plain_line, plain_markup
from ecgmatch_dist.label.agreement import agreements
from ecgmatch_dist.label.chain import LEAST, Workshop
from ecgmatch_dist.label.session import Session, Wishes
from ecgmatch_dist.terminal.next_step import preset_for
from ecgmatch_dist.terminal.waiting import waiting
from ecgmatch_dist.web import need_web

LONGEST_NAME = 60


@dataclass(frozen=True)
class Where:
    """The files of a labelling."""

    shards: str
    databases: tuple[str, ...]
    scheme: str
    to: Path


def main(
    shards: str,
    scheme: str,
    to: Path = Path("labels.csv"),
    databases: tuple[str, ...] = (),
    reader: str = "reader",
    random: bool = False,
    overlap: float = 0.2,
    features: str = "",
    train_every: int = 0,
    runs: Path = Path("runs"),
    summary: bool = False,
    host: str = "127.0.0.1",
    port: int = 8017,
) -> None:
    """Label ECGs on a page: one after the other, the most useful ones first. A model grows beside you.

    Example: ecgmatch label --shards data/shards --scheme my_classes.toml --to labels.csv --reader anna

    Every answer is saved at once in labels.csv.journal; labels.csv is made from it, for `ecgmatch split --labels`. The same
    command goes on where you stopped. Docs: docs/label.md.

    Args:
        shards: Folder of the shards.
        scheme: Label scheme: a .toml file, or a name in shards/labels.
        to: Table to write.
        databases: Databases in the folder; all unless given.
        reader: Who you are. Two readers of the same --to may work at the same time.
        random: Ask in random order instead of the most useful first.
        overlap: Share of your questions that another reader has answered already, so that you can be compared.
        features: Folder of a run whose features say which ECGs are alike, as a contrastive one, and feed the small model beside
            the page; else ECG measurements do.
        train_every: Train the chain in the background after so many answers; 0: only when the page's button is pressed.
        runs: Folder for the runs of that training.
        summary: Open no page: write the table, and print what there is.
        host: Address to listen on. Anybody who can reach it can label.
        port: Port of the page; 0: any free one.
    """
    if not 0 <= overlap <= 1:
        raise UserError(f"--overlap {overlap}: from 0 to 1")
    name = plain_line(reader).strip()
    if not name or len(name) > LONGEST_NAME:
        raise UserError(f"--reader {reader!r:.80}: a name of 1 to {LONGEST_NAME} characters")
    if train_every and train_every < LEAST:
        raise UserError(f"--train-every {train_every}: at least {LEAST} answers, or 0")
    if scheme_of(shards) and not databases:
        raise UserError(f"{shards}: the databases behind a URL cannot be listed; name them with --databases")
    where = Where(shards, databases or tuple(databases_in(shards)), scheme, to)
    rule = load_scheme(scheme)
    if to.is_dir():
        raise UserError(f"{to}: a folder; --to is the table to write, such as labels.csv")
    wishes = Wishes(name, random, overlap, features, train_every)
    preset = preset_of(where)
    workshop = Workshop(shards, scheme, ("--preset", preset), runs=runs) if preset else None
    session = Session(shards, ShardStore(shards, where.databases), rule, to, wishes, workshop)
    if session.warning:
        print(f"warning: {plain_line(session.warning)}", flush=True)
    if summary:
        session.write_table()
        show(session, where)
        return
    need_web("ecgmatch label")
    from ecgmatch_dist.label.app import Page
    from ecgmatch_dist.web.guard import Limits
    from ecgmatch_dist.web.server import make_app, serve

    taken = f"{name} is labelling {to} already, in another window; end that, or give another --reader"
    safe = "".join(mark if mark.isalnum() else "_" for mark in name)
    with only_one(to.with_name(f"{to.name}.{safe}.lock"), taken):
        session.start()
        try:
            app = make_app(Page(session, commands(where)).routes(), host, Limits(body=2**20))
            serve(app, host, port, f"{name}: {len(session.history())} of {len(session.ids):,} answered; the page")
        finally:
            with waiting("ending; a training keeps its last checkpoint"):
                session.end()
    show(session, where)


def commands(where: Where) -> list[str]:
    """How to train from the labels."""
    split = ["ecgmatch", "split", "within" if len(where.databases) == 1 else "mix"]
    split += ["--database", *where.databases] if len(where.databases) == 1 else ["--databases", *where.databases]
    split += ["--shards", where.shards, "--labels", str(where.to), "--scheme", where.scheme, "--name", "labelled"]
    preset = preset_of(where)
    train = ["ecgmatch", "train", *(["--preset", preset] if preset else []), "--split", "splits/labelled.json"]
    return [shlex.join(split), shlex.join([*train, "--shards", where.shards])]


def preset_of(where: Where) -> str:
    """The preset that is meant for these shards; empty: none, or they are elsewhere."""
    return "" if scheme_of(where.shards) else preset_for(Path(where.shards) / where.databases[0])


def show(session: Session, where: Where) -> None:
    """What there is, on the terminal."""
    console = Console()
    common = session.answers.common()
    readers = ", ".join(f"{name} {len(found)}" for name, found in session.answers.of_reader.items() if found)
    console.print(
        f"{len(common)} of {len(session.ids):,} recordings answered ({plain_markup(readers) or 'nobody yet'}); "
        f"table: {plain_markup(str(session.to))}",
        highlight=False,
    )
    table = ScreenTable("class", "yes", "no", "unknown", title_justify="left")
    for c, name in enumerate(session.scheme.classes):
        column = [int(label[c]) for label in common.values()]
        table.add_row(plain_markup(name), *(str(column.count(state)) for state in (1, 0, 255)))
    console.print(table)
    for one in agreements(session.answers):
        value = "not defined" if one.kappa is None else f"{one.kappa:.2f}"
        readers = plain_markup(" and ".join(one.readers))
        console.print(
            f"{readers}: {plain_markup(one.name)}: kappa {value} on {one.recordings} recordings", highlight=False
        )
    if common:  # not by rich, which would break the lines that people copy
        print("train from them:", *(f"  {plain_line(line)}" for line in commands(where)), sep="\n")
