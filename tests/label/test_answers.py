"""What readers said, as one label and one table: `split` reads the table as the same labels, whatever the state."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score

from ecgmatch_dist.data.label_file import read_label_file
from ecgmatch_dist.data.labels import LabelScheme, load_scheme
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.label.agreement import agreements
from ecgmatch_dist.label.answers import Answers, check_scheme
from ecgmatch_dist.label.journal import Answer, Classes

SCHEME = load_scheme("ecgmatch5")
SHORT = SCHEME.short
IDS = [f"db/r{i}" for i in range(300)]


def answers_of(*given: Answer) -> Answers:
    answers = Answers(SCHEME, set(IDS))
    for entry in (Classes(1, SHORT), *given):
        answers.check(entry)
        answers.add(entry)
    return answers


def answer(recording: str, reader: str, classes: tuple[str, ...], unsure: tuple[str, ...] = ()) -> Answer:
    return Answer(recording, reader, "2026-01-01T00:00:00+00:00", 2.25, classes, unsure)


def test_split_reads_every_state_back(tmp_path: Path) -> None:
    """All 3^4 states of four classes, and Normal alone; a class of its own that excludes others cannot be beside them."""
    given = [
        answer(
            f"db/r{i}",
            "anna",
            tuple(n for n, s in zip(SHORT[:4], state, strict=True) if s == 1),
            tuple(n for n, s in zip(SHORT[:4], state, strict=True) if s == 2),
        )
        for i, state in enumerate(product((0, 1, 2), repeat=4))
    ]
    given += [answer("db/r200", "anna", ("Normal",)), answer("db/r201", "anna", (), SHORT)]
    answers = answers_of(*given)
    (tmp_path / "labels.csv").write_text(answers.table())
    file = read_label_file(tmp_path / "labels.csv", IDS, SCHEME)
    assert file.strangers == ()
    for recording, label in answers.common().items():
        codes = file.codes["db"].get(recording.partition("/")[2], "")
        assert SCHEME.states(codes.split()).tolist() == label.tolist(), recording


def test_two_readers_who_disagree_leave_the_class_unknown() -> None:
    answers = answers_of(
        answer("db/r1", "anna", ("CD",)),
        answer("db/r1", "otto", ("CD", "STT")),
        answer("db/r2", "anna", ("CD",)),
        answer("db/r2", "otto", (), SHORT),
    )
    rows = dict(line.split(",", 1) for line in answers.table().splitlines())
    assert rows["db/r1"] == "CD|?STT,anna|otto,2026-01-01T00:00:00+00:00,4.5,STT"
    assert rows["db/r2"] == "CD,anna|otto,2026-01-01T00:00:00+00:00,4.5,"


def test_names_that_a_spreadsheet_would_run_are_harmless() -> None:
    assert "'=cmd()" in answers_of(answer("db/r1", "=cmd()", ())).table()


def test_kappa_is_scikit_learns() -> None:
    rng = np.random.default_rng(0)
    first = rng.random((200, 4)) < 0.3
    second = np.where(rng.random((200, 4)) < 0.15, ~first, first)
    given = []
    for reader, marks in (("anna", first), ("otto", second)):
        for i, row in enumerate(marks):
            given.append(answer(f"db/r{i}", reader, tuple(n for n, on in zip(SHORT[:4], row, strict=True) if on)))
    found = {one.name: one for one in agreements(answers_of(*given, answer("db/r299", "anna", ("CD",))))}
    for c, name in enumerate(SHORT[:4]):
        assert found[name].kappa == pytest.approx(cohen_kappa_score(first[:, c], second[:, c]))
        assert (found[name].recordings, found[name].one) == (200, (first[:, c] != second[:, c]).sum())
    assert found["Normal"].kappa is None  # neither ever said it
    assert agreements(answers_of(answer("db/r1", "anna", ()))) == []


@pytest.mark.parametrize("short", ["none", "A|B", "AF"])
def test_a_class_that_a_table_cannot_name_is_refused(short: str) -> None:
    scheme = LabelScheme("odd", ("One", "Two"), (short, "X"), (frozenset(), frozenset({"AF"})), None, False)
    with pytest.raises(UserError, match="rename the class"):
        check_scheme(scheme)
