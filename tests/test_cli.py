"""The command line: every command answers, help is short, mistakes are one line."""

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tyro

from ecgmatch_dist import __version__, cli
from ecgmatch_dist.arguments import EXAMPLES, parse
from ecgmatch_dist.config import methods
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.methods.fixmatch import FixMatchSettings
from ecgmatch_dist.methods.supervised import SupervisedSettings
from ecgmatch_dist.presets import PRESETS


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


def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str) -> str:
    """What `ecgmatch ARGS` prints."""
    monkeypatch.setattr(sys, "argv", ["ecgmatch", *args])
    with suppress(SystemExit):
        cli.main()
    return capsys.readouterr().out


def test_version_and_the_commands_of_a_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert say(capsys, monkeypatch, "--version") == f"ecgmatch_dist {__version__}\n"
    for args in (("shards",), ("shards", "--help"), ("shards", "-h")):
        out = say(capsys, monkeypatch, *args)
        assert "shards build" in out
        assert "shards verify" in out
        assert "predict" not in out


def test_the_short_help_of_train_fits_a_screen_and_names_the_choices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    out = say(capsys, monkeypatch, "train", "--help")
    assert out.count("\n") < 60
    assert out.index("ecgmatch train --preset few_labels") < out.index("--tag")  # examples first
    for example in EXAMPLES.strip().splitlines():
        assert f"{example.strip()}\n" in re.sub(r" +\n", "\n", out)  # each on one line
    for name in [*PRESETS, *methods()]:
        assert f"  {name} " in out, name
    assert "..." not in out  # no sentence that breaks off
    assert "--help-all" in out
    assert "--optim.momentum" not in out
    everything = say(capsys, monkeypatch, "train", "--preset", "few_labels", "--help-all")
    for option in ("--optim.lr", "--model.width", "--method.neighbours", "--name", "--pretrain.steps 4000"):
        assert option in everything, option
    assert "--pretrain.lr" not in everything  # as optim.lr


def test_an_unknown_option_is_told_once_under_a_launcher(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit):
            parse(["--optim.speed", "3"])
        told.append("--optim.speed" in capsys.readouterr().err)
    assert told == [True, False]


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_the_shell_completes_commands_options_and_choices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ecgmatch.bash").write_text(say(capsys, monkeypatch, "completion", "bash"))
    expected = {
        "ecgmatch sha": {"shards"},
        "ecgmatch shards ": {"-h", "--help", "build", "index", "verify"},
        "ecgmatch train --preset ": set(PRESETS),
        "ecgmatch train --method s": {"supervised", "softmatch"},
        "ecgmatch train --optim.sch": {"--optim.schedule"},
        "ecgmatch split --ratio": {"--ratio"},
    }
    for line, words in expected.items():
        typed = " ".join(f"'{word}'" for word in line.split(" "))
        code = f"source ecgmatch.bash; COMP_WORDS=({typed}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _tyro_ecgmatch"
        show = 'printf "%s\\n" "${COMPREPLY[@]}"'
        done = subprocess.run(
            ["bash", "-c", f"{code}; {show}"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert {*done.stdout.split("\n")} - {""} == words, line


def test_a_place_that_may_not_be_written_is_one_line(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    write = "lambda: (os.getuid() or os.setuid(65534), open(PATH, 'w'))"  # root may write everywhere
    code = f"import os; from ecgmatch_dist import cli; PATH = {str(locked / 'x.json')!r}"
    code += f"; cli.resolve = lambda args: ('', {write}, []); cli.main()"
    done = subprocess.run([sys.executable, "-c", code, "x"], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert re.fullmatch(r"ecgmatch: .*x\.json: Permission denied; name another place.*\n", done.stderr), done.stderr


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


def end_of(work: str, **options: Any) -> tuple[int, str]:
    """Exit code and message of a command that does this."""
    code = f"from ecgmatch_dist import cli; cli.resolve = lambda args: ('', lambda: {work}, []); cli.main()"
    environment = os.environ | options.pop("env", {})
    done = subprocess.run(
        [sys.executable, "-c", code, "x"], stderr=subprocess.PIPE, text=True, check=False, env=environment, **options
    )
    return done.returncode, done.stderr


def test_what_is_printed_into_a_closed_pipe_or_a_full_disk() -> None:
    """It is written at the end of a short command: Python then told of an ignored exception."""
    for work in ("print('a')", "(print('a'), exit(0))"):  # the second as --help does
        reader, writer = os.pipe()
        os.close(reader)
        assert end_of(work, stdout=writer) == (128 + signal.SIGPIPE, "")
        os.close(writer)
    with Path("/dev/full").open("w") as full:
        code, told = end_of("print('a')", stdout=full)
    assert (code, told) == (
        1,
        "ecgmatch: No space left on device; make room or repair the disk, then give the same command again\n",
    )


def test_a_terminal_that_cannot_show_a_sign_does_not_stop_a_command() -> None:
    for encoding in ("ascii", "utf-8"):
        done = end_of(r"print('\u2265 \udcfc')", stdout=subprocess.DEVNULL, env={"PYTHONIOENCODING": encoding})
        assert done == (0, ""), encoding


def test_an_interrupt_is_one_line_and_the_exit_code_of_others() -> None:
    code, told = end_of("__import__('signal').raise_signal(2)")
    assert (code, told) == (130, "ecgmatch: interrupted; the same command continues where it stopped\n")


def test_presets_and_overrides() -> None:
    assert parse([]) == PRESETS["paper"]()
    config = parse(["--preset", "few_labels", "--optim.steps", "7", "--method.neighbours", "3"])
    assert config.optim.steps == 7
    assert isinstance(config.method, ECGMatchSettings)
    assert config.method.neighbours == 3
    assert config.model == PRESETS["few_labels"]().model
    assert isinstance(parse(["--method", "fixmatch"]).method, FixMatchSettings)
    assert parse(["--method=supervised"]) == replace(PRESETS["paper"](), method=SupervisedSettings()).supervised()
    with pytest.raises(UserError, match="--preset nothing: known are paper"):
        parse(["--preset", "nothing"])
    with pytest.raises(UserError, match="--method best: known are supervised"):
        parse(["--method", "best"])


@pytest.mark.parametrize(("method", "section"), [("supervised", "pretrain"), ("contrastive", "contrast")])
def test_an_optimiser_that_would_not_be_used_is_refused(method: str, section: str) -> None:
    """The run would train with other settings than were asked for, without a word."""
    with pytest.raises(UserError, match=f"optim.weight_decay = 0.5.*--{section}.weight-decay"):
        parse(["--method", method, "--optim.weight-decay", "0.5"])
    assert parse(["--method", method, f"--{section}.weight-decay", "0.5"]).optim.weight_decay == 0.5
