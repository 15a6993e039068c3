"""The page of `ecgmatch label`: its requests over a real socket; in Chromium a whole session by keyboard, killed, continued."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ecgmatch_dist.data.labels import load_scheme
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.forecast import Range
from ecgmatch_dist.label.chain import Chain, Workshop
from ecgmatch_dist.label.choose import Chooser
from ecgmatch_dist.label.growing import Grown
from ecgmatch_dist.label.session import Session, Wishes
from ecgmatch_dist.label.space import Space
from tests.support.browser import CHROMIUM, Browser
from tests.support.serving import served
from tests.support.shard_factory import make_shards

pytest.importorskip("starlette", reason="needs the extra `web`")
from ecgmatch_dist.label.app import Page
from ecgmatch_dist.web.server import make_app, running

COUNT = 60


@pytest.fixture
def session(tmp_path: Path) -> Session:
    make_shards(tmp_path / "shards", "own", COUNT, length=200)
    scheme = load_scheme("ecgmatch5")
    store = ShardStore(tmp_path / "shards", ["own"])
    return Session(str(tmp_path / "shards"), store, scheme, tmp_path / "labels.csv", Wishes("anna"))


@pytest.fixture
def ask(session: Session) -> Iterator[Callable[..., Any]]:
    """Send a request; the answer as JSON, or the status and the sentence of an error."""
    app = make_app(Page(session, ["ecgmatch split"]).routes(), "127.0.0.1")
    with running(app, "127.0.0.1", 0) as (address, *_):

        def ask(path: str, send: object = None) -> Any:
            data = None if send is None else json.dumps(send).encode()
            request = urllib.request.Request(address + path, data, {"content-type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    text = answer.read().decode()
                    return json.loads(text) if "json" in answer.headers["content-type"] else text
            except urllib.error.HTTPError as error:
                return error.code, json.loads(error.read())["error"]

        yield ask


def test_questions_answers_and_what_they_come_to(ask: Callable[..., Any], session: Session) -> None:
    asked = ask("/api/question")
    assert asked["recording"] in session.row_of
    assert "<svg" in asked["svg"]
    answer = {
        "recording": asked["recording"],
        "classes": ["CD"],
        "unsure": ["STT"],
        "seconds": 3.2,
        "why": asked["why"],
    }
    told = ask("/api/answer", answer)
    assert told["saved"] == asked["recording"]
    assert told["next"] == ask("/api/question")
    assert told["next"]["recording"] not in ("", asked["recording"])
    back = ask("/api/question?back=1")
    assert (back["recording"], back["answer"]) == (asked["recording"], {"classes": ["CD"], "unsure": ["STT"]})
    state = ask("/api/state")
    assert (state["mine"], state["answered"], state["recordings"], state["seconds"]) == (1, 1, COUNT, 3.2)
    assert [one["yes"] for one in state["classes"]] == [1, 0, 0, 0, 0]
    assert "CD|?STT,anna" in ask("/labels.csv")
    assert ask("/api/undo", {}) == {"recording": asked["recording"]}
    assert ask("/api/state")["mine"] == 0
    assert ask("/api/question?back=7")["recording"] == ""
    assert ask("/api/question?back=%C2%B2")["recording"] == asked["recording"]  # a digit, but no number
    assert "<title>Label ECGs" in ask("/")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"recording": "own/none"}, "not in these shards"),
        ({"classes": ["<b>"]}, "no class"),
        ({"classes": "CD"}, "two lists"),
        ({"classes": [1]}, "two lists"),
        ({"seconds": "long"}, "seconds"),
        ({"seconds": float("nan")}, "seconds"),
        ({"seconds": 10**400, "recording": "own/none"}, "not in these shards"),
        ({"recording": None}, "a recording"),
    ],
)
def test_a_strange_answer_is_a_sentence_and_saves_nothing(
    ask: Callable[..., Any], session: Session, change: dict[str, object], complaint: str
) -> None:
    before = session.journal.path.read_bytes()
    good = {"recording": "own/own00001", "classes": [], "unsure": [], "seconds": 1, "why": "x"}
    status, sentence = ask("/api/answer", good | change)
    assert status == 400
    assert complaint in sentence
    assert ask("/api/answer", [1])[0] == 400
    assert session.journal.path.read_bytes() == before


def test_the_model_doubts_and_similar_ones(ask: Callable[..., Any], session: Session) -> None:
    rng = np.random.default_rng(0)
    session.chooser = Chooser(Space(rng.standard_normal((COUNT, 8))), np.arange(COUNT))
    for name in session.ids[:5]:
        session.answer(name, [], [], 1.0, "spread")
    curve = tuple((n, Range(0.5, 0.4, 0.6)) for n in (10, 20, 30, 40))
    session.grown = Grown(40, np.zeros((COUNT, 5), np.float32), curve)
    session._order = session.ids[:5]
    state = ask("/api/state")
    assert state["model"]["curve"][0] == [10, 0.5, 0.4, 0.6]
    assert state["model"]["words"] == "Too early for a forecast."
    similar = ask(f"/api/alike?recording={session.ids[9]}")
    assert [one["codes"] for one in similar] == ["none"] * 3
    assert ask("/api/alike?recording=nothing") == []
    assert ask("/api/check", {}) == {"doubts": 0}


def test_the_next_picture_is_drawn_while_this_one_is_looked_at(ask: Callable[..., Any], session: Session) -> None:
    """When the answer arrives, nothing is left to choose or to draw."""
    read = session.store.read
    drawn: list[int] = []
    session.store.read = lambda rows: (drawn.extend(rows), read(rows))[1]  # type: ignore[method-assign, func-returns-value]
    for count in range(2, 6):
        asked = ask("/api/question")
        end = time.monotonic() + 60
        while len(drawn) < count and time.monotonic() < end:
            time.sleep(0.01)
        assert len(drawn) == count
        answer = {"recording": asked["recording"], "classes": [], "unsure": [], "seconds": 1, "why": asked["why"]}
        ask("/api/answer", answer)
    assert len({*drawn}) == len(drawn), "no picture is drawn twice"


def test_the_page_trains_only_where_a_preset_fits(ask: Callable[..., Any], session: Session, tmp_path: Path) -> None:
    assert ask("/api/state")["training"] is None
    status, sentence = ask("/api/train", {})
    assert (status, "no preset is meant for these shards" in sentence) == (400, True)
    place = Workshop(session.features.shards, "ecgmatch5", splits=tmp_path / "splits", runs=tmp_path / "runs")
    session.chain = Chain(place, session.store, session.scheme, "labels", tmp_path / "training.log")
    assert ask("/api/train", {}) == (400, "0 answers: training begins with 20")
    assert ask("/api/train", {"stop": True})["running"] is False
    assert ask("/api/state")["training"]["reached"] == []


def start(folder: Path, *options: str) -> tuple[str, ...]:
    """The words of `ecgmatch label` on the shards in the folder."""
    where = ("--shards", str(folder / "shards"), "--scheme", "ecgmatch5", "--to", str(folder / "labels.csv"))
    return "-m", "ecgmatch_dist", "label", *where, *options


@contextmanager
def labelling(folder: Path, reader: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`ecgmatch label` as a person starts it, and its address."""
    with served(*start(folder, "--port", "0", "--reader", reader)) as (process, line):
        found = re.search(r"http://[\d.:]+", line)
        assert found, line + (process.stderr.read() if process.stderr else "")
        yield process, found[0]


def press(browser: Browser, key: str) -> None:
    """A key, as a person presses it. A digit also has a place on the keyboard."""
    number = {"Enter": 13, "ArrowLeft": 37}.get(key, ord(key[0].upper()))
    code = f"Digit{key}" if key.isdigit() else key
    for kind in ("rawKeyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=code, windowsVirtualKeyCode=number)


def wait_for(browser: Browser, script: str) -> None:
    end = time.monotonic() + 120
    while not browser.evaluate(script):
        assert time.monotonic() < end, script
        time.sleep(0.02)


def label(browser: Browser, keys: str, count: int) -> dict[str, str]:
    """Answer `count` questions; recording -> the key that was pressed."""
    pressed = {}
    for i in range(count):
        wait_for(browser, "document.getElementById('recording').textContent.includes('/')")
        recording = browser.evaluate("document.getElementById('recording').textContent")
        turns = browser.evaluate("document.body.dataset.ready")
        key = keys[i % len(keys)]
        press(browser, key)
        if key in "12345":
            press(browser, "Enter")
        wait_for(browser, f"document.body.dataset.ready !== '{turns}'")
        assert browser.evaluate("document.getElementById('trouble').textContent") == ""
        pressed[recording] = key
    return pressed


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_fifty_labels_by_keyboard_killed_and_continued_by_two_readers(tmp_path: Path) -> None:
    make_shards(tmp_path / "shards", "own", 80, length=200)
    pressed: dict[str, str] = {}
    with Browser(tmp_path / "profile") as browser:
        for count in (20, 30):
            with labelling(tmp_path, "anna") as (process, address):
                browser.show(address, 1400)
                pressed |= label(browser, "1230u5", count)
                os.kill(process.pid, signal.SIGKILL)
        assert len(pressed) == 50
        with labelling(tmp_path, "anna") as (_, address), labelling(tmp_path, "otto") as (_, other):
            again = [sys.executable, *start(tmp_path, "--reader", "anna")]
            refused = subprocess.run(again, capture_output=True, text=True, check=False)
            assert "labels.csv already, in another window" in refused.stderr
            browser.show(other, 420)
            second = label(browser, "1", 10)
            assert browser.evaluate("document.documentElement.scrollWidth") == 420
            browser.show(address, 1400)
            wait_for(
                browser, "document.getElementById('progress').textContent.startsWith('50 answered by you, 58 in all')"
            )
            assert browser.evaluate("document.getElementById('kappa').textContent").startswith("readers")
            press(browser, "ArrowLeft")
            wait_for(browser, "document.getElementById('why').textContent === 'answered before'")
            press(browser, "z")
            wait_for(browser, "document.getElementById('progress').textContent.startsWith('49 answered')")
        # While nobody served, the open page asked in vain; anything else would be an error of ours.
        assert [text for text in browser.complaints if "net::ERR_" not in text] == []
    last = list(pressed)[-1]
    subprocess.run([sys.executable, *start(tmp_path, "--summary")], check=True, capture_output=True)
    rows = {row["recording"]: row for row in csv.DictReader((tmp_path / "labels.csv").open())}
    expected = {"1": "CD", "2": "Rhythm", "3": "STT", "5": "Normal", "0": "none", "u": "unknown"}
    assert len(rows) == 58 - (last not in second)
    for recording, key in pressed.items():
        if recording not in second and recording != last:
            assert rows[recording]["dx"] == expected[key], recording
            assert float(rows[recording]["seconds"]) >= 0
    assert sum(row["readers"] == "anna|otto" for row in rows.values()) == len({*pressed} & {*second} - {last})
