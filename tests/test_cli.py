"""The command line: every command answers, mistakes are one line, and the documentation does not name what is not there."""

import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import tyro

from ecgmatch_dist import cli
from ecgmatch_dist.arguments import parse
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.methods.fixmatch import FixMatchSettings
from ecgmatch_dist.methods.supervised import SupervisedSettings
from ecgmatch_dist.presets import PRESETS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    path for path in sorted(ROOT.glob("**/*.md")) if not {".venv", "demo", "runs"} & set(path.relative_to(ROOT).parts)
]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_answers_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, function, _ = cli.resolve(name.split())
    with suppress(SystemExit):
        function(["--help"]) if name in cli.PARSE_THEMSELVES else tyro.cli(function, args=["--help"])
    assert "usage" in capsys.readouterr().out.lower()


@pytest.mark.parametrize("args", [["fly"], ["shards"], ["shards", "fly"]])
def test_an_unknown_command_is_refused(args: list[str]) -> None:
    with pytest.raises(UserError, match="no command"):
        cli.resolve(args)


def test_a_mistake_is_one_line_and_not_a_traceback() -> None:
    command = [sys.executable, "-m", "ecgmatch_dist", "split", "within", "--database", "chapman", "--shards", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.startswith("ecgmatch: ")
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_full_disk_is_one_line_and_not_a_traceback(tmp_path: Path) -> None:
    modules = "from ecgmatch_dist import cli; from ecgmatch_dist.files import atomic"
    write = f"{modules}; cli.resolve = lambda args: ('', lambda: atomic.write_text(PATH, TEXT), [])"
    limit = "import resource, pathlib; TEXT = 'x' * 9999; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))"
    code = f"{limit}; PATH = pathlib.Path({str(tmp_path / 'table.csv')!r}); {write}; cli.main()"
    done = subprocess.run([sys.executable, "-c", code, "report"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert done.stderr.startswith("ecgmatch: ")
    assert "table.csv: File too large; make room" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_presets_and_overrides() -> None:
    assert parse([]) == PRESETS["paper"]()
    config = parse(["--preset", "tuned", "--optim.steps", "7", "--method.neighbours", "3"])
    assert config.optim.steps == 7
    assert isinstance(config.method, ECGMatchSettings)
    assert config.method.neighbours == 3
    assert config.model == PRESETS["tuned"]().model
    assert isinstance(parse(["--method", "fixmatch"]).method, FixMatchSettings)
    assert parse(["--method=supervised"]) == replace(PRESETS["paper"](), method=SupervisedSettings()).supervised()
    with pytest.raises(UserError, match="--preset nothing: known are paper"):
        parse(["--preset", "nothing"])
    with pytest.raises(UserError, match="--method best: known are supervised"):
        parse(["--method", "best"])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_the_docs_exist(page: Path) -> None:
    for line in re.findall(r"(?:^|`|\$ )ecgmatch ([a-z][^`\n#]*)", page.read_text(), re.MULTILINE):
        words = line.split()
        assert " ".join(words[:2]) in cli.COMMANDS or words[0] in cli.COMMANDS, line
