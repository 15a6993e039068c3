"""The journal of labels: nothing is lost by kills, several writers or hands, and what does not fit is named with its line."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ecgmatch_dist.data.labels import LabelScheme
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.label.answers import Answers
from ecgmatch_dist.label.journal import Answer, Classes, Journal, Undo, now

SCHEME = LabelScheme("two", ("Fibrillation", "ST changes"), ("AF", "ST"), (frozenset(), frozenset()), None, False)
IDS = [f"db/r{i}" for i in range(1000)]


def opened(path: Path, scheme: LabelScheme = SCHEME) -> tuple[Journal, Answers]:
    answers = Answers(scheme, set(IDS))
    journal = Journal(path, answers)
    if not journal.exists:
        journal.append(Classes(1, scheme.short))
    return journal, answers


def answer(recording: str, *classes: str, reader: str = "anna", unsure: tuple[str, ...] = ()) -> Answer:
    return Answer(recording, reader, now(), 1.5, classes, unsure, "random")


def test_answers_come_back(tmp_path: Path) -> None:
    journal, answers = opened(tmp_path / "j")
    journal.append(answer("db/r1", "AF"))
    journal.append(answer("db/r2", unsure=("ST",)))
    journal.append(answer("db/r1", "ST"))
    again = opened(tmp_path / "j")[1]
    for found in (answers, again):
        assert found.standing("anna")["db/r1"].classes == ("ST",)
        assert found.common()["db/r2"].tolist() == [0, 255]
    journal.append(Undo("db/r1", "anna", now()))
    assert opened(tmp_path / "j")[1].standing("anna")["db/r1"].classes == ("AF",)
    journal.append(Undo("db/r1", "anna", now()))
    assert list(opened(tmp_path / "j")[1].standing("anna")) == ["db/r2"]
    assert len((tmp_path / "j").read_text().splitlines()) == 6  # nothing was rewritten


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_cut_last_line_is_left_out_and_told(tmp_path: Path, cut: int) -> None:
    journal, _ = opened(tmp_path / "j")
    for i in range(3):
        journal.append(answer(f"db/r{i}", "AF"))
    whole = (tmp_path / "j").read_bytes()
    (tmp_path / "j").write_bytes(whole[: -cut - 1])
    again, answers = opened(tmp_path / "j")
    assert "line 4 was cut by a kill" in again.warning
    assert list(answers.standing("anna")) == ["db/r0", "db/r1"]
    again.append(answer("db/r9"))
    assert list(opened(tmp_path / "j")[1].standing("anna")) == ["db/r0", "db/r1", "db/r9"]


def test_a_whole_last_line_without_its_end_counts(tmp_path: Path) -> None:
    opened(tmp_path / "j")[0].append(answer("db/r1", "AF"))
    (tmp_path / "j").write_bytes((tmp_path / "j").read_bytes().rstrip(b"\n"))
    journal, answers = opened(tmp_path / "j")
    assert (journal.warning, list(answers.standing("anna"))) == ("", ["db/r1"])
    journal.append(answer("db/r2"))
    assert len(opened(tmp_path / "j")[1].standing("anna")) == 2


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"recording": "db/r1", "reader": "a", "at": "", "seconds": 1, "classes": ["XX"]}', "`XX` is no class"),
        ('{"recording": "db/none", "reader": "a", "at": "", "seconds": 1, "classes": []}', "`db/none` is not in these"),
        ('{"recording": "db/r1", "reader": "a", "at": "", "seconds": 1, "classes": [], "sure": 1}', "key `sure`"),
        ('{"recording": "db/r1", "reader": "a", "at": "", "seconds": "x", "classes": []}', "seconds = 'x'"),
        ('{"recording": "db/r1", "reader": "a", "at": "", "seconds": -1, "classes": []}', "seconds that it took"),
        ('{"recording": "db/r1"}', "is missing"),
        ('{"undo": "db/r7", "reader": "a", "at": ""}', "no answer on `db/r7`"),
        ("{", "not JSON"),
        ("7", "not an object"),
        ('{"format": 2, "classes": []}', "format 2"),
        ('{"format": 1, "classes": ["NEW"]}', "asked for `NEW`"),
    ],
)
def test_an_edited_line_is_named_and_nothing_is_lost(tmp_path: Path, line: str, complaint: str) -> None:
    opened(tmp_path / "j")[0].append(answer("db/r1", "AF"))
    lines = (tmp_path / "j").read_text().splitlines()
    (tmp_path / "j").write_text("\n".join([lines[0], line, lines[1]]) + "\n")
    before = (tmp_path / "j").read_bytes()
    with pytest.raises(UserError, match="line 2") as error:
        opened(tmp_path / "j")
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)
    assert (tmp_path / "j").read_bytes() == before


def test_another_file_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / "j").write_text('{"recording": "db/r1", "reader": "a", "at": "", "seconds": 1, "classes": []}\n')
    with pytest.raises(UserError, match="no journal of labels"):
        opened(tmp_path / "j")


def test_what_does_not_fit_is_not_written(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path / "j")
    before = (tmp_path / "j").read_bytes()
    for bad in (answer("db/r1", "XX"), answer("elsewhere/r1"), answer("db/r1", "AF", unsure=("AF",))):
        with pytest.raises(UserError):
            journal.append(bad)
    assert (tmp_path / "j").read_bytes() == before


def test_an_edit_under_a_running_session_is_noticed(tmp_path: Path) -> None:
    journal, _ = opened(tmp_path / "j")
    journal.append(answer("db/r1", "AF"))
    (tmp_path / "j").write_bytes((tmp_path / "j").read_bytes().replace(b'"AF"]}', b'"ST"]}').replace(b"anna", b"otto"))
    with pytest.raises(UserError, match="changed by another program"):
        journal.append(answer("db/r2"))


def test_a_class_that_is_asked_for_later_is_unknown_in_earlier_answers(tmp_path: Path) -> None:
    opened(tmp_path / "j")[0].append(answer("db/r1", "AF"))
    more = LabelScheme("three", ("F", "S", "Block"), ("AF", "ST", "BB"), (frozenset(),) * 3, None, False)
    journal, answers = opened(tmp_path / "j", more)
    journal.append(Classes(1, more.short))
    journal.append(answer("db/r2", "BB"))
    assert answers.common()["db/r1"].tolist() == [1, 0, 255]
    assert answers.common()["db/r2"].tolist() == [0, 0, 1]
    with pytest.raises(UserError, match="asked for `BB`, which the scheme two does not have"):
        opened(tmp_path / "j")


def write_many(path: Path, reader: str) -> None:
    journal, _ = opened(path)
    for i in range(40):
        journal.append(answer(f"db/r{i}", reader=reader))


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    journal, answers = opened(tmp_path / "j")
    workers = [
        multiprocessing.get_context("fork").Process(target=write_many, args=(tmp_path / "j", name))
        for name in ("anna", "otto")
    ]
    for worker in workers:
        worker.start()
    journal.append(answer("db/r999", reader="third"))
    for worker in workers:
        worker.join()
    journal.catch_up()
    assert {reader: len(found) for reader, found in answers.of_reader.items()} == {"anna": 40, "otto": 40, "third": 1}
    for line in (tmp_path / "j").read_text().splitlines():
        json.loads(line)


WRITER = """
import sys
from pathlib import Path
from ecgmatch_dist.data.labels import LabelScheme
from ecgmatch_dist.label.answers import Answers
from ecgmatch_dist.label.journal import Answer, Classes, Journal, now
scheme = LabelScheme("two", ("Fibrillation", "ST changes"), ("AF", "ST"), (frozenset(), frozenset()), None, False)
journal = Journal(Path(sys.argv[1]), Answers(scheme, {f"db/r{i}" for i in range(1000)}))
journal.append(Classes(1, scheme.short))
for i in range(100000):
    journal.append(Answer(f"db/r{i % 1000}", "anna", now(), 1.5, ("AF",)))
    print(i, flush=True)
"""


def test_kill_9_loses_no_answer_that_was_told_to_be_saved(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "j")], cwd=root, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout
        for told in writer.stdout:
            if int(told) >= 25:
                os.kill(writer.pid, signal.SIGKILL)
                break
        told_last = max(int(line) for line in [told, *writer.stdout.read().splitlines()])
    _, answers = opened(tmp_path / "j")
    assert {f"db/r{i}" for i in range(told_last + 1)} <= {*answers.standing("anna")}
