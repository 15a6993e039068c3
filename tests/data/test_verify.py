import base64
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from ecgmatch_dist import resources
from ecgmatch_dist.data import build, modes, verify
from ecgmatch_dist.data.card import _durations
from ecgmatch_dist.data.databases import Expected, Recipe
from ecgmatch_dist.data.index import read_manifest
from ecgmatch_dist.data.make_split import make_split
from ecgmatch_dist.data.preprocess import PRESETS
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from tests.support.recordings import make_signal, write_record

SINUS, FIBRILLATION = "426783006", "164889003"
RECIPE = Recipe("own", title="My <own> database", expected=Expected(4, 4, {"Normal": 3, "Rhythm": 2}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(4):
        rate = 200 if i == 3 else 100
        x = make_signal(i, n=10 * rate)
        if i == 1:
            x[2] = 0
        write_record(tmp_path / "raw", f"r{i}", x, rate, FIBRILLATION if i == 3 else SINUS)
    build.build(RECIPE, tmp_path / "raw", tmp_path / "out", PRESETS["cpu"], shard_size=2)
    return tmp_path / "out/own"


def edit_manifest(folder: Path, old: str, new: str) -> None:
    """Change the manifest and put the right checksum into dataset.json: only its meaning is wrong then."""
    text = (folder / "manifest.csv").read_text()
    assert old in text
    (folder / "manifest.csv").write_text(text.replace(old, new, 1))
    dataset = json.loads((folder / "dataset.json").read_text())
    dataset["manifest_sha256"] = hashlib.sha256((folder / "manifest.csv").read_bytes()).hexdigest()
    (folder / "dataset.json").write_text(json.dumps(dataset))


def test_good_shards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = verify.verify(folder)
    assert result.problems == []
    assert result.differences == ["of class Rhythm: 1, expected 2"]
    verify.main(folder.parent)
    out = capsys.readouterr().out
    assert f"{folder}: 4 recordings, no problems" in out
    assert "of class Rhythm: 1, expected 2" in out
    with pytest.raises(UserError, match="1 problems"):
        verify.main(folder, expect=True)


@pytest.mark.slow
def test_three_ways_to_read_side_by_side(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verify.main(folder, modes=True)
    header, *lines = capsys.readouterr().out.splitlines()[-4:]
    assert header.split() == ["first", "batch", "recordings/s", "memory", "mixing"]
    assert [line[:26].strip() for line in lines] == list(modes.MODES)
    assert all(float(line.split()[-1]) > 0 for line in lines)


def test_mixing_is_one_for_a_random_draw_and_little_for_one_shard_at_a_time() -> None:
    shards = np.repeat(np.arange(10), 100)
    mixed = np.random.default_rng(0).permutation(1000).reshape(20, 50)
    assert modes.relative_mixing(shards, list(mixed)) == pytest.approx(1, abs=0.02)
    assert modes.relative_mixing(shards, list(np.arange(1000).reshape(20, 50))) == pytest.approx(0.1, abs=0.01)


def test_shards_that_may_only_be_read_are_verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with TemporaryDirectory() as place:
        shards = shutil.copytree(folder, Path(place) / "own")
        Path(place).chmod(0o755)
        shards.chmod(0o555)
        with without_rights():
            verify.main(shards)
            assert "4 recordings, no problems; no card" in capsys.readouterr().out
            with pytest.raises(PermissionError):
                verify.verify(shards, shards / "cards")
        verify.main(shards, cards=Path(place) / "cards")
        assert (Path(place) / "cards" / "own.html").is_file()
        shards.chmod(0o755)


@contextmanager
def without_rights() -> Iterator[None]:
    """As a user who owns nothing: root may write everywhere."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_long_recordings_stay_in_sight_among_many_durations() -> None:
    few = [(10, 500), (30, 1)]
    assert _durations(few) == [("10 s", 500), ("30 s", 1)]
    many = [(3, 2), (9, 1), (10, 5000), *((seconds, 1) for seconds in range(11, 31)), (1800, 7)]
    rows = _durations(many)
    assert rows[:3] == [("0–4 s", 2), ("5–9 s", 1), ("10 s", 5000)]
    assert rows[-1] == ("1280–1800 s", 7)
    assert sum(count for _, count in rows) == sum(count for _, count in many)
    assert len(rows) <= 12


def test_card(folder: Path) -> None:
    verify.verify(folder)
    card = (folder / "card.html").read_text()
    assert "My &lt;own&gt; database" in card, "text is escaped"
    assert "All checksums and offsets are right, and the labels" in card
    assert '<span class="wrong">flat:III</span>' in card
    assert '<span class="wrong">resampled' not in card, "not a fault"
    assert '<span class="quiet">resampled</span>' in card
    pictures = [base64.b64decode(found).decode() for found in re.findall(r"data:image/svg\+xml;base64,([^\"]+)", card)]
    assert len(pictures) == 3
    assert all("mV" not in picture and "10 mm = 5 standard deviations" in picture for picture in pictures)
    assert "http://" not in card.replace("http://www.w3.org", "")


@pytest.mark.parametrize("byte", [700, 30000])
def test_a_changed_byte(folder: Path, byte: int) -> None:
    tar = folder / "own-000001.tar"
    content = bytearray(tar.read_bytes())
    content[byte] ^= 1
    tar.chmod(0o644)
    tar.write_bytes(content)
    (problem,) = verify.verify(folder).problems
    assert problem == (
        "own-000001.tar: its checksum is not the one in dataset.json; "
        "remove own-000001.csv and build again: only this shard is written anew"
    )
    (folder / "own-000001.csv").unlink()
    build.build(RECIPE, folder.parents[1] / "raw", folder.parent, PRESETS["cpu"], shard_size=2)
    assert verify.verify(folder).problems == []


def test_a_shard_that_is_gone_or_too_many(folder: Path) -> None:
    (folder / "own-000000.tar").rename(folder / "own-000009.tar")
    problems = verify.verify(folder).problems
    assert any(p.startswith("own-000000.tar: cannot be read (No such file") for p in problems)
    assert "own-000009.tar: in the folder, but not in dataset.json" in problems
    assert problems[0] in (folder / "card.html").read_text()


def test_an_index_that_does_not_fit_its_tar(folder: Path) -> None:
    offset = int(read_manifest(folder)["offset"][1])
    for wrong in (offset + 2, offset - 512, 0, 10**9):
        edit_manifest(folder, f",{offset},", f",{wrong},")
        (problem,) = verify.verify(folder).problems
        assert (
            problem == f"own-000000.tar: r1: at offset {wrong} there is no float16 array [12, 1024] of this recording"
        )
        edit_manifest(folder, f",{wrong},", f",{offset},")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("r0,own,Normal", "r0,own,Rhythm", "r0: labelled `Rhythm`, but its codes give `Normal`"),
        (f"Normal,{SINUS}", f"Rhythm,{FIBRILLATION}", "labels or codes in its .json"),
        ("1,r1,own", "1,r0,own", "r0 is there twice"),
        ("1,r1,own", "1,r1,other", "recordings of another database than own"),
        ("own-000000.tar", "own-000007.tar", "own-000007.tar: in manifest.csv, but not in dataset.json"),
        ("2,r2,", "2,r7,", "its 2 recordings are not the 2 that manifest.csv puts there"),
    ],
)
def test_a_manifest_that_says_something_else(folder: Path, old: str, new: str, message: str) -> None:
    edit_manifest(folder, old, new)
    assert any(message in problem for problem in verify.verify(folder).problems)


def test_rows_that_are_not_in_order(folder: Path) -> None:
    edit_manifest(folder, "0,r0,", "1,r0,")
    with pytest.raises(UserError, match="rows are not 0 to 3"):
        verify.verify(folder)


def test_a_wrong_checksum_of_one_recording(folder: Path) -> None:
    sha = read_manifest(folder)["sha256"][2]
    edit_manifest(folder, sha, "0" * 64)
    assert verify.verify(folder).problems == ["own-000001.tar: r2: its checksum is not the one in manifest.csv"]


def test_a_manifest_that_was_changed(folder: Path) -> None:
    with (folder / "manifest.csv").open("a") as stream:
        stream.write("\n")
    with pytest.raises(UserError, match=r"its checksum is not the one in dataset\.json"):
        verify.main(folder)


def test_what_is_no_folder_of_shards(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no shards there"):
        verify.main(tmp_path)
    (tmp_path / "dataset.json").write_text("[]")
    with pytest.raises(UserError, match=r"dataset\.json: a list instead of an object; build the shards again"):
        verify.main(tmp_path)
    (tmp_path / "dataset.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        verify.main(tmp_path)


@pytest.mark.parametrize(
    ("recipe", "scheme", "become"),
    [
        ("keep", "drop", "are left out, being of no class"),  # by every split, though they are in the shards
        ("drop", "drop", "are left out, being of no class"),
        ("keep", "keep", "count as having none of the classes"),
    ],
)
def test_what_becomes_of_strange_codes_is_told_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: Any, scheme: str, become: str
) -> None:
    for i in range(40):
        codes = ("426783006", "164889003", "59118001", "strange")[i % 4]
        write_record(tmp_path / "raw", f"r{i}", make_signal(i, n=100), codes=codes)
    five = resources.find("shards/labels", "ecgmatch5").read_text(encoding="utf-8")
    (tmp_path / "own.toml").write_text(re.sub('unlabelled = "drop"', f'unlabelled = "{scheme}"', five))
    own = Recipe("own", unlabelled=recipe, scheme=str(tmp_path / "own.toml"))
    build.build(own, tmp_path / "raw", tmp_path / "out", PRESETS["cpu"])
    verify.main(tmp_path / "out")
    told = "codes that match no class: strange 10; add them to `codes` of a class, or to `ignored`; until then, 10 recordings "
    assert capsys.readouterr().out.count(told + become) == 1 + (recipe == "keep")  # by the build, and by verify
    store = ShardStore(tmp_path / "out", ["own"])
    split = make_split(store, "within", 1, 20, own.scheme)
    assert sum(map(len, split.parts.values())) == (40 if become.startswith("count") else 30)


def test_unknown_recordings_and_strange_codes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are no fault of the shards, but nobody should have to find out by training."""
    for i, codes in enumerate(("426783006", "AF|RBBB", "", "")):
        write_record(tmp_path / "raw", f"r{i}", make_signal(i, n=1000), codes=codes)
    build.build(Recipe("own", unlabelled="keep"), tmp_path / "raw", tmp_path / "out", PRESETS["cpu"])
    verify.main(tmp_path / "out")
    out = capsys.readouterr().out
    assert "labels    2 with a diagnosis (1 of no class), 2 unknown" in out
    assert "Normal 1 (50.0%)" in out, "the share is of those with a diagnosis"
    assert "no problems" in out
    assert out.count("codes that match no class: AF|RBBB 1;") == 2, "by the build and by verify"
    card = (tmp_path / "out/own/card.html").read_text()
    assert "2 recordings have no diagnosis: unknown, not healthy" in card
    assert "AF|RBBB" in card
