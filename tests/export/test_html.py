"""model.html: the model inside a page, compared with `predict` in a real browser."""

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wfdb

import ecgmatch_dist as em
from ecgmatch_dist.data.preprocess import LEADS
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.export import html_page, ort_web
from ecgmatch_dist.export.html_page import write_page
from tests.support.browser import CHROMIUM, Browser
from tests.support.prediction import ecg, write_model, write_record

DATABASES = ("chapman_shaoxing", "georgia", "ningbo", "ptb-xl")
READ = """JSON.stringify([...document.querySelectorAll('#page tr[data-class]')].map(
row => [row.dataset.class, +row.dataset.probability, +row.dataset.calibrated]))"""


def test_where_the_runtime_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_web.shutil, "which", lambda _: None)
    with pytest.raises(
        UserError, match=r"needs the npm package onnxruntime-web@.*, and there is no npm here; get it where"
    ):
        ort_web.find_ort_web(None)
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho 'no such host' >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setattr(ort_web.shutil, "which", lambda _: str(npm))
    with pytest.raises(UserError, match=r"npm could not fetch .* \(no such host\); get it where"):
        ort_web.find_ort_web(None)
    with pytest.raises(UserError, match=r"not the npm package"):
        ort_web.find_ort_web(tmp_path / "nothing.tgz")
    with pytest.raises(UserError, match=r"no ort\.wasm\.bundle\.min\.mjs in it"):
        ort_web.find_ort_web(tmp_path)
    for name in ort_web.HASHES:
        (tmp_path / name).write_bytes(b"something else")
    with pytest.raises(UserError, match=r"its ort\.wasm\.bundle\.min\.mjs is not that of onnxruntime-web@1"):
        ort_web.find_ort_web(tmp_path)
    with tarfile.open(tmp_path / "x.tgz", "w:gz") as package:
        for name in ort_web.HASHES:
            package.add(tmp_path / name, f"package/dist/{name}")
    with pytest.raises(UserError, match="is not that of"):
        ort_web.find_ort_web(tmp_path / "x.tgz")


def test_what_the_numbers_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the pages of `predict`. The graph and the runtime are left out."""
    monkeypatch.setattr(html_page, "write_onnx", lambda path, *_: path.write_bytes(b""))
    monkeypatch.setattr(html_page, "check_onnx", lambda *_: 0.0)
    monkeypatch.setattr(html_page, "_script", lambda _: "")
    for cases, said in ((20, "They are too few: it must not be read as a\nfrequency."), (60, "of the 60 validation")):
        model = em.load(write_model(tmp_path / f"run{cases}", cases=cases), "cpu")
        write_page(tmp_path / "model.html", model, ort_web.OrtWeb("", b""))
        page = (tmp_path / "model.html").read_text()
        assert said in page
        assert page.count("Normal Signals stands alone by the label rule: it is not named beside another class.") == 1


def answers(browser: Browser, files: list[Path], count: int) -> list[Any]:
    """Rows of the list, each its text and the numbers of its page."""
    items = "[...document.querySelectorAll('#results li')]"
    browser.evaluate("document.getElementById('results').replaceChildren()")
    browser.choose("#files", *files)
    browser.wait_for(f"{items}.length == {count} && {items}.every(item => item.children.length)", 200)
    found = []
    for number in range(count):
        text = browser.evaluate(f"{items}[{number}].innerText")
        if browser.evaluate(f"{items}[{number}].querySelector('strong') !== null"):
            browser.evaluate(f"{items}[{number}].querySelector('button').click()")
            text += browser.evaluate("document.getElementById('page').innerText")
            found.append((text, {short: numbers for short, *numbers in json.loads(browser.evaluate(READ))}))
        else:
            found.append((text, None))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
def test_in_a_browser(tmp_path: Path, shared_data: Path) -> None:
    """Originals of four databases and `odd` (one of 38 s), a file of format 212, and CSV: the numbers of `predict` with the
    model that comes with the package, a network of crops; and nothing is sent."""
    pytest.importorskip("onnxscript")
    try:
        runtime = ort_web.find_ort_web(None)
    except UserError as error:
        pytest.skip(str(error))
    model = em.load("chapman_ptbxl", "cpu")
    write_page(tmp_path / "model.html", model, runtime)
    originals = shared_data / "wfdb500"
    headers = [min((originals / name / "g1").glob("*.hea")) for name in DATABASES] + [
        *(originals / "odd").glob("*.hea")
    ]
    every = model.predict_files(sorted(originals.glob("*/g1/*.hea")))
    # Normal beside another class: which recordings have that, the model decides.
    headers.append(Path(next(answer.path for answer in every if not answer.error and model.gave_way(answer))))
    headers.append(write_record(tmp_path / "short", "short", ecg(4, 250), 250))
    packed = {"fmt": ["212"] * 12, "adc_gain": [200] * 12, "baseline": [0] * 12, "write_dir": str(tmp_path)}
    wfdb.wrsamp("packed", 500, ["mV"] * 12, list(LEADS), ecg(seed=6).T, **packed)
    headers.append(tmp_path / "packed.hea")
    files = [file for header in headers for file in header.parent.glob(f"{header.stem}.*")]
    signal = ecg(10, 400, seed=5).astype(np.float32)
    lines = [",".join(f"{value:.6f}" for value in row) for row in signal[[1, 0, *range(2, 12)]].T]
    names = [f"{lead} [mV]" for lead in ("II", "I", *LEADS[2:])]
    (tmp_path / "x.csv").write_text("\n".join([",".join(names), *lines]))
    (tmp_path / "<b>.jpg").write_bytes(b"\xff")
    with Browser(tmp_path / "profile") as browser:
        browser.show(tmp_path / "model.html", 1400)
        browser.wait_for("!document.getElementById('state').textContent", 200)
        worst = 0.0
        for expected, (text, numbers) in zip(
            model.predict_files(headers), answers(browser, files, len(headers)), strict=True
        ):
            if expected.error:
                assert expected.error in text
                continue
            assert model.gave_way(expected) in text
            for name, (probability, calibrated) in numbers.items():
                worst = max(
                    worst, abs(probability - expected.probabilities[name]), abs(calibrated - expected.calibrated[name])
                )
        assert 0 < worst < 1e-4
        (text, numbers), (refused, _) = answers(browser, [tmp_path / "x.csv", tmp_path / "<b>.jpg"], 2)
        assert "does not say its sampling rate" in text
        assert "this page reads WFDB" in refused
        browser.evaluate("document.getElementById('rate').value = 400")
        ((_, numbers),) = answers(browser, [tmp_path / "x.csv"], 1)
        expected = model.predict(signal, rate=400)
        assert [p for p, _ in numbers.values()] == pytest.approx(list(expected.probabilities.values()), abs=1e-4)
        assert "25 mm/s · " in browser.evaluate("document.querySelector('svg.ecg').textContent")
        assert "Not a medical device" in browser.evaluate("document.body.innerText")
        blocked = "fetch('https://example.org/').then(() => 'sent', () => 'not sent')"
        assert browser.evaluate(blocked) == "not sent"
        assert all("example.org" in complaint for complaint in browser.complaints)
        browser.show(tmp_path / "model.html", 420)
        assert browser.evaluate("document.documentElement.scrollWidth") <= 420
        own = (tmp_path / "model.html").as_uri()
        assert {url for url in browser.requests if not url.startswith(("data:", "blob:", "about:"))} <= {
            own,
            "https://example.org/",
        }
