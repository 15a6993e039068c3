"""`ecgmatch serve` over real HTTP and in a real browser."""

import http.client
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from ecgmatch_dist.predict.model import Predictor
from tests.support.browser import CHROMIUM, Browser
from tests.support.prediction import CLASSES, ecg, write_model, write_record
from tests.support.serving import served

pytest.importorskip("starlette", reason="needs the extra `web`")
from ecgmatch_dist.serve.app import AT_ONCE, make_serve_app
from ecgmatch_dist.serve.desk import Desk, signal_files
from ecgmatch_dist.web.guard import Limits
from ecgmatch_dist.web.server import running

LEADS = "I II III aVR aVL aVF V1 V2 V3 V4 V5 V6"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "run")


@pytest.fixture(scope="module")
def desk(run: Path) -> Desk:
    return Desk(Predictor(run, "cpu"))


@pytest.fixture(scope="module")
def address(desk: Desk, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server whose temporary files lie in a folder that must be empty at the end."""
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("temporary"))
    with running(make_serve_app(desk, "127.0.0.1", Limits(2**20, 60)), "127.0.0.1", 0) as (address, *_):
        yield address
    assert os.listdir(tempfile.tempdir) == []
    tempfile.tempdir = before


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return write_record(tmp_path, "a", ecg(seed=3))


def send(address: str, *files: Path | tuple[str, bytes], **said: str) -> tuple[int, Any]:
    parts = [("file", (f.name, f.read_bytes()) if isinstance(f, Path) else f) for f in files]
    answer = requests.post(f"{address}/predict", files=parts, data=said, timeout=60)
    return answer.status_code, answer.json()


def test_json_has_the_numbers_of_predict(address: str, desk: Desk, record: Path, tmp_path: Path) -> None:
    (expected,) = desk.model.predict_files(record)
    status, found = send(address, record, record.with_suffix(".dat"))
    assert status == 200
    assert found["warning"] == "For research. Not a medical device."
    assert found["names"]["CD"] == "Conduction Disturbance"
    assert found["recordings"] == [expected.to_json() | {"path": "a.hea"}]
    np.save(tmp_path / "b.npy", ecg(seed=3))
    status, found = send(
        address, tmp_path / "b.npy", record, record.with_suffix(".dat"), rate="500", unit="mV", leads=LEADS
    )
    assert [row["path"] for row in found["recordings"]] == ["b.npy", "a.hea"]
    for name in CLASSES:
        one, other = (row["classes"][name]["probability"] for row in found["recordings"])
        assert one == pytest.approx(other, abs=1e-3)  # WFDB has 16 bits
    assert "page" not in found["recordings"][0]
    _, found = send(address, record, record.with_suffix(".dat"), page="yes")
    assert "Not a medical device" in found["recordings"][0]["page"]


def test_what_is_no_ecg_is_refused_with_a_sentence(address: str, record: Path) -> None:
    data = record.with_suffix(".dat")
    for files, said, expected in (
        ([record], {}, "a.hea: unreadable: No such file or directory: a.dat; send the header and its signal files together"),
        ([data], {}, "signals need their WFDB header (.hea): send both together"),
        ([("a.hea", record.read_bytes()), ("a.dat", data.read_bytes()[:1000])], {}, "cut short: a.dat holds 41 of 5000"),
        ([("cat.jpg", b"\xff\xd8\xff")], {}, "cat.jpg: format: a JPEG file, which is a picture; export the signal itself"),
        ([("x.csv", b"I,II\n1,2\n" * 20)], {}, "x.csv: layout: not a table of numbers"),
        ([("x.npy", b"\x93NUMPY")], {}, "x.npy: unreadable"),
        ([("x.npy", b"")], {}, "x.npy: unreadable"),
        ([("../../etc/x.npy", b"")], {}, "x.npy: unreadable"),
        ([("x.npy", b"1")], {"rate": "fast"}, "rate = 'fast': a number"),
        ([("x.npy", b"1")], {"unit": "stone"}, "stone"),
        ([("..", b"1")], {}, "a file cannot be called"),
        ([("a" * 300, b"1")], {}, "a file cannot be called"),
        ([("a.npy", b"1"), ("b/a.npy", b"2")], {}, "two files are called a.npy"),
        ([("x.npy", b"1" * 2**20)], {}, "more than 1 MiB, the limit"),
        ([(f"{i}.npy", b"1") for i in range(101)], {}, "Too many files"),
    ):  # fmt: skip
        status, found = send(address, *files, **said)
        assert 400 <= status < 500, found
        assert expected in found["error"]
        assert "/" not in found["error"].replace("../../etc", "").replace("b/a", ""), "a path of the server"
    answer = requests.post(f"{address}/predict", data=b"x", timeout=60)
    assert (answer.status_code, answer.json()["error"][:22]) == (415, "send files as a form, ")
    assert requests.get(f"{address}/predict", timeout=60).status_code == 405


def test_what_is_called_a_header_is_not_taken_apart_word_by_word() -> None:
    """Every word of it became a text, once for each other file: memory and time were many times the size of the request."""
    words = b" ".join(b"%x" % number for number in range(300_000))
    files = {f"{number}.hea": words for number in range(15)} | {f"{number}.dat": b"" for number in range(85)}
    tracemalloc.start()
    found = signal_files(files | {"a.hea": b"a 1 500\na.dat 16\n# a.mat\n"})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == {"a", "a.dat", "#", "0"}
    assert peak < 2**23


def test_a_bad_file_costs_the_others_nothing(address: str, record: Path) -> None:
    status, found = send(address, ("cat.jpg", b"\xff"), record, record.with_suffix(".dat"))
    assert status == 200
    assert [bool(row["error"]) for row in found["recordings"]] == [True, False]


def test_several_clients_at_once(address: str, desk: Desk, tmp_path: Path) -> None:
    """Each gets its own answer; more than the server takes at once are told to come back."""
    records = [write_record(tmp_path / str(seed), "a", ecg(seed=seed)) for seed in range(6)]
    expected = [answer.to_json()["classes"] for answer in desk.model.predict_files(records)]
    found: dict[int, Any] = {}

    def client(number: int) -> None:
        found[number] = send(address, records[number], records[number].with_suffix(".dat"))

    with desk.lock:  # all wait for the model
        clients = [threading.Thread(target=client, args=(number,)) for number in range(6)]
        for each in clients:
            each.start()
        assert requests.get(address, timeout=60).status_code == 200  # the page does not wait
    for each in clients:
        each.join()
    assert [found[number][1]["recordings"][0]["classes"] for number in range(6)] == expected

    def crowd() -> None:
        codes.append(send(address, records[0], records[0].with_suffix(".dat"))[0])

    codes: list[int] = []
    with desk.lock:
        clients = [threading.Thread(target=crowd) for _ in range(AT_ONCE + 3)]
        for each in clients:
            each.start()
        while codes.count(503) < 3:
            clients[0].join(0.05)
    for each in clients:
        each.join()
    assert sorted(codes) == [200] * AT_ONCE + [503] * 3


def test_mutations_are_answered_with_sentences(address: str, record: Path, run: Path) -> None:
    """Bytes of a good request are changed at random: file contents and the form itself."""
    rng = random.Random(0)
    files = [(path.name, path.read_bytes()[:20_000]) for path in (record, record.with_suffix(".dat"))]
    request = requests.Request("POST", f"{address}/predict", files=[("file", file) for file in files]).prepare()
    assert isinstance(request.body, bytes)
    codes = set()
    for _ in range(60):
        body = bytearray(request.body)
        for _ in range(rng.randint(1, 12)):
            place = rng.randrange(min(len(body), 3000))
            if rng.random() < 0.3:
                del body[place : place + rng.randint(1, 50)]
            else:
                body[place] = rng.randrange(256)
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
        connection.request("POST", "/predict", bytes(body), {"Content-Type": str(request.headers["Content-Type"])})
        answer = connection.getresponse()
        found = json.loads(answer.read())
        codes.add(answer.status)
        assert answer.status in (200, 400, 422), found
        assert answer.status == 200 or found["error"]
        connection.close()
    assert len(codes) > 1


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
def test_in_a_browser(address: str, desk: Desk, tmp_path: Path, shared_data: Path) -> None:
    """Real files are chosen; the page of the first is shown, others by a click; a bad one is a sentence."""
    headers = [next((shared_data / "wfdb500" / name / "g1").glob("*.hea")) for name in ("ptb-xl", "georgia")]
    files = [file for header in headers for file in header.parent.glob(f"{header.stem}.*")]
    np.save(tmp_path / "x.npy", ecg())
    (tmp_path / "<img src=x onerror=alert(1)>.jpg").write_bytes(b"\xff\xd8")
    expected = [answer.to_json() for answer in desk.model.predict_files(headers)]
    with Browser(tmp_path / "profile") as browser:
        browser.show(address, 1400)
        browser.choose("#files", *files, *tmp_path.glob("x.npy"), *tmp_path.glob("*.jpg"))
        browser.wait_for(
            "document.querySelectorAll('#results li').length == 4 && !document.getElementById('state').textContent"
        )
        texts = browser.evaluate("[...document.querySelectorAll('#results li')].map(item => item.innerText)")
        for row, text in zip(expected, texts[:2], strict=True):
            assert row["record"] in text
            assert ("no class is likely" in text) == (not row["likely"])
        assert "does not name its 12 leads" in texts[2]
        assert "<img src=x" in texts[3]
        inner = "document.getElementById('page').contentDocument"
        browser.wait_for(f"{inner}.querySelector('h1')?.textContent == {json.dumps(headers[0].stem)}")
        browser.evaluate("document.querySelectorAll('#results button')[1].click()")
        browser.wait_for(f"{inner}.querySelector('h1')?.textContent == {json.dumps(headers[1].stem)}")
        assert browser.evaluate(f"{inner}.querySelectorAll('svg.ecg').length") > 0
        assert browser.evaluate("document.getElementById('page').offsetHeight") > 800
        for name, text in (("rate", "500"), ("unit", "mV"), ("leads", LEADS)):  # try again with what was missing
            browser.evaluate(f"document.getElementById('{name}').value = '{text}'")
        browser.evaluate("[...document.querySelectorAll('#results button')].at(-1).click()")
        browser.wait_for("document.querySelectorAll('#results li .error').length == 1")
        assert len(browser.complaints) == 2, browser.complaints  # of the answers 422, by the browser itself
        assert all("status of 422" in complaint for complaint in browser.complaints)
        own = {f"{address}/{name}" for name in ("", "drop.css", "choose.js", "drop.js", "predict")}
        assert {url.partition("?")[0] for url in browser.requests} <= {"about:blank", "about:srcdoc", "data:,", *own}
        browser.show(address, 420)
        assert browser.evaluate("document.documentElement.scrollWidth") <= 420


@pytest.mark.slow
def test_the_command(run: Path, tmp_path: Path, record: Path) -> None:
    command = [sys.executable, "-m", "ecgmatch_dist", "serve", str(run), "--port"]
    with served(*command[1:], "0", TMPDIR=str(tmp_path)) as (process, line):
        assert line.startswith("drop ECG files here: http://127.0.0.1:")
        address = line.split()[4]
        assert send(address, record, record.with_suffix(".dat"))[0] == 200
        port = address.rpartition(":")[2]
        taken = subprocess.run([*command, port], capture_output=True, text=True, check=False)
        assert taken.returncode == 1
        assert taken.stdout == ""
        assert taken.stderr.startswith(f"ecgmatch: 127.0.0.1:{port}: Address already in use; give --port ")
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=200) == ("stopped\n", "")
        assert process.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"a.hea", "a.dat"}


def test_an_exported_folder_is_served(run: Path, tmp_path: Path, record: Path) -> None:
    from ecgmatch_dist.export import command

    command.main(run, to=tmp_path / "model", onnx=False)
    exported = Desk(Predictor(tmp_path / "model", "cpu"))
    files = {path.name: path.read_bytes() for path in (record, record.with_suffix(".dat"))}
    (row,) = exported.answer(files, {"page": "yes"}, float("inf"))["recordings"]
    assert row["error"] == ""
    assert row["nearest"] == []
    assert "<svg" in row["page"]
