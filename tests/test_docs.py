"""The documentation names only what is there: every command in it is read by the real parsers, every link leads somewhere."""

import importlib.util
import inspect
import re
from pathlib import Path

import numpy as np
import pytest

from ecgmatch_dist import cli
from ecgmatch_dist.predict.flags import WORDS
from tests.support.commands import ROOT, check_command, commands, pages

PAGES = [path for path in pages() if path.suffix == ".md"]


def mentions(page: Path) -> list[str]:
    """Commands that a sentence mentions, perhaps without the arguments that they need."""
    spans = re.findall(
        r"`ecgmatch ([^`]+)`", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    )
    return [span for span in spans if re.match("[a-z]", span)]


LINES = [(page, command) for page in pages() for command in dict.fromkeys(commands(page))]


def test_the_commands_are_found() -> None:
    """Otherwise the tests below would say nothing."""
    assert {"README.md", "slurm.md", "experiments.md", "own-data.md", "ladder.toml"} <= {page.name for page, _ in LINES}
    assert len(LINES) > 40


@pytest.mark.parametrize(("page", "command"), LINES, ids=[f"{p.stem}: {c[:60]}" for p, c in LINES])
def test_every_command_is_one(page: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        check_command(command)
    except SystemExit:
        told = capsys.readouterr()
        pytest.fail(f"{page.name}: {command}\n{told.out}{told.err}")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if mentions(page)], ids=lambda path: str(path.relative_to(ROOT))
)
def test_every_command_that_a_sentence_mentions_has_these_options(page: Path) -> None:
    for span in mentions(page):
        words = span.split()
        if cli.is_group(words[0]) and words[1:] in ([], ["--help"]):
            continue
        name = " ".join(words[:2]) if " ".join(words[:2]) in cli.COMMANDS else words[0]
        assert name in cli.COMMANDS, span
        flags = {word.split("=")[0] for word in words if word.startswith("--")} - {"--help", "--help-all"}
        if name == "train" and flags:
            check_command(f"ecgmatch {span}")
        elif name != "bench":
            known = {f"--{option.replace('_', '-')}" for option in inspect.signature(cli.load(name)).parameters}
            assert flags <= known, span


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, part in re.findall(r"\]\(([^)#:\s]*)(#[^)]*)?\)", page.read_text(encoding="utf-8")):
        file = page.parent / target if target else page
        assert file.exists(), target
        if part and file.suffix == ".md":
            assert part[1:] in anchors(file), f"{target}{part}"


def test_every_page_is_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    ahead = [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        seen.add(page)
        targets = re.findall(r"\]\(([^)#:\s]+\.(?:md|svg))(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        ahead += [path for target in targets if (path := (page.parent / target).resolve()) not in seen]
    assert {path for path in (ROOT / "docs").iterdir() if path.suffix in (".md", ".svg")} <= seen


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_pinned_package_has_a_hash_and_a_licence() -> None:
    """After a change of constraints.txt: python tools/supply_chain.py."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    hashed = dict(
        re.findall(r"^(\S+) --hash=sha256:([0-9a-f]{64})$", (ROOT / "requirements-hashed.txt").read_text(), re.M)
    )
    assert [pin for pin in pins if not pin.startswith("torch==")] == list(hashed)
    listed = dict(re.findall(r"^\| (\S+) \| (.*\S) \|$", (ROOT / "docs/licences.md").read_text(), re.M))
    assert {pin.split("==")[0] for pin in pins} <= set(listed)
    assert not [name for name, licence in listed.items() if re.search(r"\b[AL]?GPL", licence)]


def test_the_picture_of_the_ladder_shows_the_tables() -> None:
    """After a change of the tables in docs/experiments.md: python tools/ladder.py."""
    spec = importlib.util.spec_from_file_location("ladder", ROOT / "tools" / "ladder.py")
    assert spec
    assert spec.loader
    ladder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ladder)
    tables = ladder.read_tables((ROOT / "docs/experiments.md").read_text(encoding="utf-8"))
    means = [f"{value:.3f}" for _, mean in tables.values() for value in mean]
    for sets, mean in tables.values():
        assert np.mean(sets, axis=0) == pytest.approx(mean, abs=6e-4)
    drawn = re.findall(r">(0\.\d{3})</text>", (ROOT / "docs/ladder.svg").read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(means) == 10
    assert drawn == means
    assert all(mean in readme for mean in means)


def test_no_two_exports_of_a_page_write_to_the_same_folder() -> None:
    """The second one would be refused."""
    for page in pages():
        places = re.findall(r"^ecgmatch export .*?--to (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert len(places) == len({*places}), page


def test_every_flag_is_in_the_table() -> None:
    text = (ROOT / "docs" / "predict.md").read_text(encoding="utf-8").split("| flag |")[1].split("\n\n")[0]
    assert {name.partition(":")[0] for name in re.findall(r"`([^`]+)`", text)} == {*WORDS}
