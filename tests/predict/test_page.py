"""The page of an ECG: true to scale, complete, self-contained; what is odd about a signal is said."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ecgmatch_dist.export import command as export
from ecgmatch_dist.predict import command
from ecgmatch_dist.predict.flags import sentences
from ecgmatch_dist.predict.influence import influence
from ecgmatch_dist.predict.known import KnownSignals
from ecgmatch_dist.predict.model import Predictor
from ecgmatch_dist.predict.paper import Picture
from ecgmatch_dist.predict.prepare import prepare
from ecgmatch_dist.predict.read import Reader, RecordRef
from tests.support.prediction import ecg, write_model, write_record
from tests.support.shard_factory import make_shards


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "run")


def trace(svg: str, number: int) -> np.ndarray:
    """Points [2, n] of the numbered path of the leads, in mm."""
    x, y, steps = re.findall(r'scale\(.01\)" stroke-width="28" d="M(-?\d+) (-?\d+)l([-\d ]+)"', svg)[number]
    moves = np.array(steps.split(), int).reshape(-1, 2).T
    return np.concatenate([[[int(x)], [int(y)]], moves], axis=1).cumsum(1) / 100


def test_25_mm_a_second_and_10_mm_a_millivolt() -> None:
    """A step of 1 mV at 1 s in lead I; lead aVR begins at 2.5 s; the strip of lead II is 10 s long."""
    signal = np.zeros((12, 2500))
    signal[0, 250:260] = 1
    signal[1, 250:260] = 2
    svg = Picture(signal, 250).svg("x")
    first, second, strip = trace(svg, 0), trace(svg, 1), trace(svg, 12)
    assert np.ptp(first[1]) == pytest.approx(10)
    assert np.ptp(second[1]) == pytest.approx(20)
    assert first[0, np.argmin(first[1])] - first[0, 0] == pytest.approx(25)
    assert np.ptp(strip[0]) == pytest.approx(250, abs=0.2)
    assert trace(svg, 3)[0, 0] - first[0, 0] == pytest.approx(62.5)
    assert "10 mm/mV" in svg
    assert "5 mm/mV" in Picture(3 * ecg(), 500).svg("x")
    assert len(svg) < 100_000


def test_gaps_and_short_recordings_can_be_drawn() -> None:
    signal = ecg(3)
    signal[0, 100:300] = np.nan
    assert Picture(signal, 500).svg("<&>").count("&lt;&amp;&gt;") == 1


def test_the_page(run: Path, tmp_path: Path) -> None:
    records = [write_record(tmp_path / place, "<N1>", ecg()) for place in ("a", "b")]
    command.main(run, tuple(map(str, records)), pages=tmp_path / "pages")
    assert sorted(path.name for path in (tmp_path / "pages").iterdir()) == ["N1-2.html", "N1.html", "index.html"]
    page = (tmp_path / "pages" / "N1.html").read_text()
    assert "Not a medical device" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "<N1>" not in page
    assert "No pictures: the shards are not at hand" in page
    assert page.count("<svg") == 1
    assert "F2" in page
    assert "set low so that few cases are missed (possible). Dashed mark: 50 % (likely)." in page
    assert 'data-mark="CD"' in page
    assert "Normal Signals reaches its threshold, too. It stands alone by the label rule" in page  # and CD was named
    assert "passed on without" not in page
    assert "Not a medical device" in (tmp_path / "pages" / "index.html").read_text()


def test_a_model_without_known_cases_says_so(run: Path, tmp_path: Path) -> None:
    export.main(run, to=tmp_path / "model", onnx=False)
    record = write_record(tmp_path, "N1", ecg())
    command.main(tmp_path / "model", (str(record),), pages=tmp_path / "pages")
    page = (tmp_path / "pages" / "N1.html").read_text()
    assert "None: this model was passed on without the recordings that it learned from" in page
    command.main(run, (str(record),), pages=tmp_path / "none", nearest=0)
    assert "nearest known cases" not in (tmp_path / "none" / "N1.html").read_text()  # as was asked


def test_what_the_numbers_mean(run: Path, tmp_path: Path) -> None:
    """Normal stands alone unless each class is asked for by itself; 20 validation recordings are too few for a frequency."""
    record = (str(write_record(tmp_path, "N1", ecg())),)

    def page(model: Path, only: bool = True) -> str:
        command.main(model, record, pages=tmp_path / "pages", only=only)
        return (tmp_path / "pages" / "N1.html").read_text()

    by_itself, alone = (
        "judges each class by itself",
        "Normal Signals stands alone by the label rule: it is not named beside",
    )
    few = "was fitted on 20 validation recordings. They are too few: it must not be read as a frequency"
    text = page(run)
    assert (by_itself in text, alone in text, few in text) == (True, True, True)
    text = page(write_model(tmp_path / "more", cases=1050), only=False)
    assert (by_itself in text, alone in text, few in text) == (True, False, False)
    assert "on 1,050 validation recordings, about 80 % of those given 80 %" in text
    for model, told in ((run, "fitted on 20 recordings, too few"), (tmp_path / "more", "can be read as a frequency")):
        export.main(model, to=tmp_path / f"given {model.name}", onnx=False)
        assert told in (tmp_path / f"given {model.name}" / "README.md").read_text()


def test_a_recording_that_is_a_known_case_is_told(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, other = (str(write_record(tmp_path, name, ecg(seed=seed))) for name, seed in (("own", 1), ("other", 2)))
    model = shutil.copytree(run, tmp_path / "run")
    kept = Predictor(run, "cpu")
    for part, first in (("labelled", 100), ("validation", 1)):
        path = model / "predictions" / f"{part}.npz"
        features = [kept.embed(ecg(seed=first + 2 * number), rate=500) for number in range(20)]
        np.savez(path, **(dict(np.load(path)) | {"features": np.stack(features)}))
    command.main(model, (own, other), pages=tmp_path / "pages")
    told = "This recording, or a copy of it, is among those that the model has learnt from or was chosen with"
    assert told in (tmp_path / "pages" / "own.html").read_text()
    assert told not in (tmp_path / "pages" / "other.html").read_text()
    assert " ".join(capsys.readouterr().out.split()).count(told) == 1


def test_pictures_of_known_cases(tmp_path: Path) -> None:
    """Those of the shards, if they were made as the model's input is."""
    run = write_model(tmp_path / "run")
    for part in ("labelled", "validation"):
        path = run / "predictions" / f"{part}.npz"
        arrays = dict(np.load(path)) | {"ids": np.array([f"chapman/chapman{i:05}" for i in range(20)])}
        np.savez(path, **arrays)
    signals = make_shards(tmp_path / "shards", "chapman", 20, 1024)
    record = str(write_record(tmp_path, "N1", ecg()))
    command.main(run, (record,), pages=tmp_path / "pages", shards=str(tmp_path / "shards"), nearest=2)
    page = (tmp_path / "pages" / "N1.html").read_text()
    assert page.count("<svg") == 4  # the recording, the recording as the model sees it, two cases
    assert "No pictures" not in page
    model = Predictor(run, "cpu")
    assert np.array_equal(KnownSignals(model, str(tmp_path / "shards")).read("chapman/chapman00007"), signals[7])
    make_shards(tmp_path / "other", "chapman", 20, 512)
    assert "another preprocessing" in KnownSignals(model, str(tmp_path / "other")).why_not


def test_occlusion_finds_the_lead_that_counts(run: Path) -> None:
    """The network is replaced by one that looks at V2 between 3 and 4 s alone."""
    model = Predictor(run, "cpu")
    (x,) = prepare_one(model)

    class LooksAtV2:
        def __call__(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return x[:, 0, :1], np.repeat(np.abs(x[:, 7, 300:400].astype(np.float32)).sum(1)[:, None], 5, axis=1)

    model.forward = LooksAtV2()  # type: ignore[method-assign]
    effects, seconds = influence(model, x)
    assert seconds == 0.5
    assert set(np.argwhere(effects[:, :, 0] > 2)[:, 0]) == {7}
    assert set(np.argsort(effects[7, :, 0])[-2:]) == {6, 7}


def prepare_one(model: Predictor) -> np.ndarray:
    from ecgmatch_dist.data.formats.read import from_array
    from ecgmatch_dist.data.preprocess import LEADS

    return prepare(from_array(ecg(), rate=500, unit="mV", leads=LEADS), model.inputs).x


def test_a_wrong_checksum_is_flagged(run: Path, tmp_path: Path) -> None:
    header = write_record(tmp_path, "changed", ecg())
    reader = Reader(Predictor(run, "cpu").inputs)
    ref = RecordRef("changed", header)
    assert reader.read(ref).flags == ()
    content = bytearray(header.with_suffix(".dat").read_bytes())
    content[24 * 100] ^= 1  # one bit of lead I
    header.with_suffix(".dat").write_bytes(content)
    assert reader.read(ref).flags == ("checksum:I",)
    assert replace(reader, rate=100).read(ref).flags == ("checksum:I",)


def test_flags_in_words() -> None:
    found = dict(sentences(["flat:V1", "flat:V2", "resampled", "derived:III", "checksum:I"]))
    assert found["No signal in V1, V2: constant."]
    assert not found["III computed from I and II, which is exact."]
    assert len(found) == 3
    missing = [text for text, _ in sentences(["missing:V3", "flat:V3", "flat:V4"])]
    assert missing[1:] == ["No signal in V4: constant."]


def test_real_originals(run: Path, shared_data: Path) -> None:
    """The odd ones are answered as they deserve; another rate of the same signal gives nearly the same answer."""
    model = Predictor(run, "cpu")
    found = {Path(p.path).stem: p for p in model.predict_files(shared_data / "wfdb500" / "odd")}
    assert "cut short" in found["A5383"].error
    assert "flat:V3" in found["JS11476"].flags  # type: ignore[union-attr]
    assert "windows:7" in found["S0001"].flags  # type: ignore[union-attr]
    assert not [p for p in found.values() if any("checksum" in flag for flag in getattr(p, "flags", ()))]
