"""Settings and fixtures that all tests share."""

import os
import signal
from pathlib import Path

# Some hypervisors advertise AMX and trap it: without this, bf16 kernels end the process with SIGILL.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

# A shell that starts the tests in the background has them ignore Ctrl-C, and all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real ECGs beside the repository; tests that need it skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"real ECGs are not here ({SHARED})")
    return SHARED


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of one database of 200 recordings (`shards`) and its within split (`split.json`)."""
    from tests.support.training import make_data  # torch is slow to import, and not every test needs it

    folder = tmp_path_factory.mktemp("data")
    make_data(folder)
    return folder
