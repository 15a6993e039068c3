"""`ecgmatch monitor`: TensorBoard takes its place, so that no signal leaves one behind."""

import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.record.monitor import main
from ecgmatch_dist.web.address import refuse_a_taken_port


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "a.ecgmatch" / "tb").mkdir(parents=True)
    return tmp_path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_folder_without_runs_and_a_taken_port_are_refused(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run with TensorBoard files"):
        main(runs / "a.ecgmatch" / "tb")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(
            UserError, match=rf"127\.0\.0\.1:{port}: Address already in use; give --port \d+, which is free"
        ):
            main(runs, port)
    with pytest.raises(UserError, match="no such port"):
        main(runs, 70000)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_tensorboard_without_a_word(runs: Path, number: signal.Signals) -> None:
    port = free_port()
    command = [sys.executable, "-m", "ecgmatch_dist", "monitor", "--runs", str(runs), "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        end = time.time() + 200
        answered = False
        while not answered and time.time() < end and process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=5):
                answered = True
            time.sleep(0.1)
        process.send_signal(number)
        assert process.stderr is not None
        told = process.stderr.read()  # until nobody has the pipe any more: the command and all that it started are gone
        process.wait(30)
    assert answered, told
    assert "the same command continues" not in told
    assert "Traceback" not in told
    refuse_a_taken_port("127.0.0.1", port)  # nobody listens any more
