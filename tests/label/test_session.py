"""A session without its page: questions, answers, two readers, the table, and files that somebody else changes."""

import csv
import io
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ecgmatch_dist.data.labels import load_scheme
from ecgmatch_dist.data.splits import split_shards
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.label import session as session_module
from ecgmatch_dist.label.choose import Chooser
from ecgmatch_dist.label.command import main
from ecgmatch_dist.label.features import Features
from ecgmatch_dist.label.growing import Doubt, Grown
from ecgmatch_dist.label.session import Session, Wishes
from ecgmatch_dist.label.space import Space
from tests.support.commands import check_command
from tests.support.shard_factory import make_shards

COUNT = 30
SCHEME = load_scheme("ecgmatch5")


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    make_shards(tmp_path / "shards", "own", COUNT, length=200)
    return tmp_path / "shards"


def session_of(shards: Path, reader: str = "anna", **wishes: object) -> Session:
    store = ShardStore(shards, ["own"])
    to = shards.parent / "labels.csv"
    return Session(str(shards), store, SCHEME, to, Wishes(reader, **wishes))  # type: ignore[arg-type]


def answer_all(session: Session, count: int) -> list[str]:
    asked = []
    for i in range(count):
        question = session.question()
        assert question
        session.answer(question.recording, [SCHEME.short[i % 4]], [], 2.0, question.why)
        asked.append(question.recording)
    return asked


def test_every_recording_is_asked_once_and_split_takes_the_table(shards: Path) -> None:
    session = session_of(shards)
    asked = answer_all(session, COUNT)
    assert len({*asked}) == COUNT
    assert session.question() is None
    session.write_table()
    rows = list(csv.DictReader(io.StringIO(session.to.read_text())))
    assert {row["recording"] for row in rows} == {*asked}
    assert {row["readers"] for row in rows} == {"anna"}
    split = split_shards(str(shards), "within", database="own", labels=session.to, to=shards.parent / "splits", ratio=1)
    assert split[0].is_file()


def test_an_interrupted_session_goes_on_where_it_was(shards: Path) -> None:
    first = answer_all(session_of(shards), 7)
    again = session_of(shards)
    assert again.history() == first
    assert not {*answer_all(again, 5)} & {*first}


def test_a_question_stays_until_it_is_answered_and_undo_asks_it_again(shards: Path) -> None:
    session = session_of(shards)
    first = session.question()
    assert first == session.question()
    (recording,) = answer_all(session, 1)
    assert session.undo() == recording
    assert session.question().recording == recording  # type: ignore[union-attr]
    assert session.history() == []
    with pytest.raises(UserError, match="no answer to take back"):
        session.undo()


def test_two_readers_share_some_recordings_and_all_of_them_if_told(shards: Path) -> None:
    first = answer_all(session_of(shards), 10)
    second = answer_all(session_of(shards, "otto", overlap=0.5), 10)
    assert len({*first} & {*second}) == 5
    assert {*answer_all(session_of(shards, "eva", overlap=1.0), 15)} == {*first, *second}


def test_two_sessions_at_once_see_each_others_answers(shards: Path) -> None:
    anna, otto = (session_of(shards, name, overlap=0.0) for name in ("anna", "otto"))
    for _ in range(6):
        first, second = answer_all(anna, 1), answer_all(otto, 1)
        assert first != second
    anna.write_table()
    otto.write_table()
    assert len(otto.to.read_text().splitlines()) == 13


def test_a_table_that_somebody_changed_is_not_overwritten(shards: Path) -> None:
    session = session_of(shards)
    answer_all(session, 3)
    session.write_table()
    edited = session.to.read_text().replace("CD", "STT")
    session.to.write_text(edited)
    answer_all(session, 1)
    with pytest.raises(UserError, match="changed by hand"):
        session.write_table()
    with pytest.raises(UserError, match=r"labels\.csv: it was changed by hand .* safe in labels\.csv\.journal"):
        session_of(shards)
    assert session.to.read_text() == edited
    session.to.rename(shards.parent / "mine.csv")
    again = session_of(shards)
    again.write_table()
    assert len(again.history()) == 4


def test_a_table_of_somebody_else_is_not_overwritten(shards: Path) -> None:
    (shards.parent / "labels.csv").write_text("recording,dx\nown00001,CD\n")
    with pytest.raises(UserError, match="is there already"):
        session_of(shards)


def test_answers_that_make_no_sense_are_refused(shards: Path) -> None:
    session = session_of(shards)
    for classes, complaint in ((["XX"], "XX: no class"), (["Normal", "CD"], "cannot be beside")):
        with pytest.raises(UserError, match=complaint):
            session.answer("own/own00001", classes, [], 1, "")
    with pytest.raises(UserError, match="not in these shards"):
        session.answer("own/elsewhere", [], [], 1, "")
    assert session.history() == []


def test_doubted_labels_come_when_they_are_wanted_and_once(shards: Path) -> None:
    session = session_of(shards)
    asked = answer_all(session, 6)
    session.grown = Grown(6, np.zeros((COUNT, 5), np.float32), doubts=(Doubt(4, 0, 0, 0.9), Doubt(1, 0, 1, 0.1)))
    session._order = asked
    assert session.question().why == "random"  # type: ignore[union-attr]
    before = session.question()
    assert session.check() == 2
    for expected in (asked[4], asked[1]):
        question = session.question()
        assert question
        assert (question.recording, question.why) == (expected, "check")
        session.answer(expected, [], [], 1.0, "check")
    assert session.question() == before  # it was put back, not lost


def test_nobody_waits_for_the_table(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is slow to write holds up neither an answer nor a question."""
    slow, written = threading.Event(), threading.Event()
    monkeypatch.setattr(session_module, "PAUSE", 0.0)

    def write(path: Path, text: str) -> None:
        written.set()
        assert slow.wait(60)
        path.write_text(text)

    monkeypatch.setattr(session_module, "write_text", write)
    session = session_of(shards)
    thread = threading.Thread(target=session._keep_table)
    thread.start()
    answer_all(session, 1)
    assert written.wait(60)
    answer_all(session, 3)  # while the table is being written
    slow.set()
    session._stop.set()
    thread.join(60)
    session.write_table()
    assert len(session.to.read_text().splitlines()) == 5


def with_chooser(shards: Path, reader: str = "anna", **wishes: object) -> Session:
    session = session_of(shards, reader, **wishes)
    session.chooser = Chooser(Space(np.random.default_rng(0).standard_normal((COUNT, 8))), np.arange(COUNT))
    return session


@pytest.mark.parametrize("make", [session_of, with_chooser])
def test_what_is_chosen_ahead_is_what_is_asked(shards: Path, make: Callable[..., Session]) -> None:
    """The same questions as without looking ahead, each known before the one before it is answered; also those of another
    reader."""
    answer_all(make(shards, "otto"), 6)
    session, asked = make(shards, overlap=0.5), []
    (shards.parent / "plain").mkdir()
    shutil.copy(shards.parent / "labels.csv.journal", shards.parent / "plain")
    while question := session.question():
        ahead = session.look_ahead()
        assert ahead != question
        session.answer(question.recording, [], [], 1.0, question.why)
        assert session.question() == ahead
        asked.append(question.recording)
    assert len({*asked}) == COUNT
    plain = Session(
        str(shards), session.store, SCHEME, shards.parent / "plain" / "labels.csv", Wishes("anna", overlap=0.5)
    )
    if session.chooser:
        plain.chooser = with_chooser(shards).chooser
    assert answer_all(plain, COUNT) == asked


def test_a_question_that_gives_way_comes_back(shards: Path) -> None:
    """Two answers are taken back while a third question is open, and chosen ahead is a fourth: all are asked, each once."""
    session = with_chooser(shards)
    first, second = answer_all(session, 2)
    third = session.question()
    fourth = session.look_ahead()
    assert third
    assert fourth
    assert [session.undo(), session.undo()] == [second, first]
    assert [answer_all(session, 1)[0] for _ in range(4)] == [first, second, third.recording, fourth.recording]
    assert len({*session.history(), *answer_all(session, COUNT - 4)}) == COUNT


def test_what_another_reader_answered_in_the_meantime_is_not_asked(shards: Path) -> None:
    anna, otto = (with_chooser(shards, name, overlap=0.0) for name in ("anna", "otto"))
    anna.question()
    ahead = anna.look_ahead()
    assert ahead
    otto.answer(ahead.recording, [], [], 1.0, "random")
    answer_all(anna, 1)
    assert anna.question() != ahead


def test_similar_ones_are_answered_ones(shards: Path) -> None:
    session = session_of(shards)
    answer_all(session, 5)
    assert session.alike("own/own00001") == []  # nothing is measured yet
    rng = np.random.default_rng(0)
    session.chooser = Chooser(Space(rng.standard_normal((COUNT, 8))), np.arange(COUNT))
    question = session.question()
    assert question
    found = session.alike(question.recording)
    assert len(found) == 3
    assert {name for name, *_ in found} <= {*session.history()}
    assert found[0][1] <= found[1][1] <= found[2][1]


def test_measurements_are_kept_and_continued(shards: Path) -> None:
    store, path = ShardStore(shards, ["own"]), shards.parent / "f"
    rows = np.arange(COUNT)
    features = Features(path, str(shards), store, rows)
    features.measure(threading.Event())
    values = features.all()
    path.write_bytes(path.read_bytes()[:-1000])  # a kill in the middle of a row
    cut = Features(path, str(shards), store, rows)
    assert 0 < cut.done < COUNT
    assert np.array_equal(cut._values[cut.measured()], values[cut.measured()])  # type: ignore[index]
    path.write_bytes(b'{"format": 1}\n' + path.read_bytes())
    assert Features(path, str(shards), store, rows).done == 0


def test_the_commands_that_the_page_shows_are_commands(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer_all(session_of(shards), 3)
    main(str(shards), "ecgmatch5", shards.parent / "labels.csv", summary=True)
    told = capsys.readouterr().out
    assert "3 of 30 recordings answered (anna 3)" in told
    for line in told.splitlines():
        if line.startswith("  ecgmatch"):
            check_command(line.strip())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"overlap": 2.0}, "--overlap"), ({"reader": "  "}, "--reader"), ({"databases": ("no",)}, "no")],
)
def test_options_that_make_no_sense(shards: Path, options: dict[str, object], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        main(str(shards), "ecgmatch5", shards.parent / "labels.csv", **options)  # type: ignore[arg-type]
