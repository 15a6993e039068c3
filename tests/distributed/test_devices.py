"""Faults of devices: a GPU that torch cannot use, ranks that disagree, bf16 that is only emulated, errors of NCCL."""

import os
import threading
import tomllib
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from ecgmatch_dist.bank.memory import Worker
from ecgmatch_dist.distributed import devices, session, whereabouts
from ecgmatch_dist.distributed.devices import has_bf16, pick_device, use_whole_fp32
from ecgmatch_dist.distributed.whereabouts import during, failed_collective
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.launch.site import load_site
from ecgmatch_dist.network.student import resolve_precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(("bound", "threads"), [([{0, 1}, {2, 3}], 2), ([{0, 1, 2, 3}] * 2, 2), ([{0}, {0}], 1)])
def test_cores_are_divided_once(bound: list[set[int]], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the launcher has given each rank cores of its own."""
    store = torch._C._distributed_c10d.HashStore()
    monkeypatch.setattr(session, "_timeout", timedelta(seconds=20))
    own = threading.local()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: own.cores)
    found = {}

    def rank(number: int) -> None:
        own.cores = bound[number]
        found[number] = session.share_of_cores(store, session.Ranks(number, 2, number, 2, CPU))

    both = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert found == {0: threads, 1: threads}


def test_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_NVLS_ENABLE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    try:
        devices.use_deterministic_algorithms()
        assert torch.are_deterministic_algorithms_enabled()
        assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_NVLS_ENABLE"]) == (":4096:8", "0")
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in devices.SLURM:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return tmp_path


def nvidia_smi(folder: Path, text: str, code: int = 0) -> None:
    """A driver that answers like this."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\nprintf '{text}'\nexit {code}\n")
    path.chmod(0o755)


def test_without_any_gpu_auto_is_the_cpu(no_slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_device("auto", 0) == CPU
    nvidia_smi(no_slurm, "NVIDIA-SMI has failed because it could not communicate with the driver", 9)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "0")
    assert pick_device("auto", 0) == CPU


def test_a_gpu_that_torch_cannot_use_is_refused(no_slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(no_slurm, "GPU 0: NVIDIA A100 (UUID: 1)\\nGPU 1: NVIDIA A100 (UUID: 2)\\n")
    with pytest.raises(UserError, match=r"nvidia-smi sees 2 GPUs, but this torch .*CPUs only.*runtime\.device = cpu"):
        pick_device("auto", 0)
    assert pick_device("cpu", 0) == CPU
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=r"CUDA_VISIBLE_DEVICES is empty.*gpus_per_node"):
        pick_device("auto", 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    def old_driver() -> bool:
        warnings.warn(
            "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040).", stacklevel=1
        )
        return False

    monkeypatch.setattr(torch.cuda, "is_available", old_driver)
    with pytest.raises(UserError, match=r"driver on your system is too old.*update the driver"):
        pick_device("auto", 0)


@pytest.mark.parametrize("name", devices.SLURM)
def test_gpus_of_slurm_are_not_left_unused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "2")
    with pytest.raises(UserError, match=rf"Slurm allotted GPUs \({name}=2\)"):
        pick_device("auto", 0)
    assert pick_device("cpu", 0) == CPU


@pytest.mark.parametrize(
    ("gpus", "texts"),
    [
        (("", "a", ""), [f"computes on {kind}, but 1 of the 3 ranks have a GPU" for kind in ("cpu", "cuda", "cpu")]),
        (("a", "b", "a"), ["computes on cuda:0, but 3 ranks have only 2 GPUs"] * 3),
        (("a", "b", "c"), [""] * 3),
    ],
)
def test_ranks_without_a_gpu_of_their_own_are_refused(
    gpus: tuple[str, ...], texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads with one store; `gpus`: the identity of each one's GPU, empty on a CPU."""
    store, own = torch._C._distributed_c10d.HashStore(), threading.local()
    said: dict[int, str] = {}
    monkeypatch.setattr(session, "_timeout", timedelta(seconds=60))
    monkeypatch.setattr(session, "gpu_of", lambda device: own.gpu)

    def body(rank: int) -> None:
        own.gpu = gpus[rank]
        try:
            session.agree_on_device(store, session.Ranks(rank, 3, rank, 3, CUDA if own.gpu else CPU))
            said[rank] = ""
        except UserError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    for rank, expected in enumerate(texts):
        assert expected in said[rank]
        assert not expected or f"rank {rank} on " in said[rank]


def test_bf16_only_where_the_device_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, bool]] = []
    for native, precision in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda native=native, **options: asked.append(options) or native
        )
        assert resolve_precision("auto", CUDA) == precision
        assert has_bf16(CUDA) == native
    assert all(options == {"including_emulation": False} for options in asked)
    with pytest.raises(UserError, match=r"runtime\.precision = 'bf16': .*fp32"):
        resolve_precision("bf16", CUDA)
    assert resolve_precision("bf16", CPU) == "bf16"  # slow, but right
    assert resolve_precision("auto", CPU) == "fp32"


def test_the_bank_s_thread_is_on_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda d: calls.append((threading.current_thread().name, d)))
    Worker(torch.device("cuda", 3)).submit(lambda: calls[0]).result(10)  # type: ignore[arg-type, return-value]
    assert calls == [("bank", torch.device("cuda", 3))]


def test_an_error_of_the_device_reaches_who_waits_for_the_bank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of the task it would end the thread, and the step would wait for ever."""

    def fail(device: torch.device) -> None:
        raise RuntimeError(f"CUDA error: out of memory on {device}")

    monkeypatch.setattr(torch.cuda, "set_device", fail)
    worker = Worker(torch.device("cuda", 3))
    for _ in range(2):  # the thread goes on
        with pytest.raises(RuntimeError, match="out of memory on cuda:3"):
            worker.submit(lambda: None).result(10)  # type: ignore[arg-type, return-value]


DUPLICATE = (
    "NCCL error: invalid usage, ncclInvalidUsage. Duplicate GPU detected : rank 1 and rank 0 both on device 4000"
)
GONE = "NCCL error: remote process exited or there was a network error, ncclRemoteError"


@pytest.mark.parametrize(
    ("text", "step", "lost"), [(DUPLICATE, 0, False), (DUPLICATE, 1, False), (GONE, 0, True), (GONE, 1, True)]
)
def test_an_error_of_nccl_before_the_first_step(
    text: str, step: int, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whereabouts, "here", whereabouts.Whereabouts())
    for number in range(1, step + 1):
        with during("reading", number):
            pass
    with pytest.raises(RuntimeError) as caught, during("batchnorm"):
        raise torch.distributed.DistBackendError(text)
    assert bool(failed_collective(caught.value)) == lost


def test_an_error_of_nccl_in_a_later_step_is_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whereabouts, "here", whereabouts.Whereabouts())
    for number in (201, 202):  # resumed at step 200
        with during("reading", number):
            pass
    with pytest.raises(RuntimeError) as caught, during("batchnorm"):
        raise RuntimeError("NCCL error: unhandled system error")
    assert failed_collective(caught.value) == "batchnorm"


def test_the_flight_recorder_writes_beside_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"SLURM_JOB_ID": "7", "TORCH_FR_BUFFER_SIZE": "5"})
    session.record_flights(tmp_path / "runs" / "flight-recorder")
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "5"
    assert os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/runs/flight-recorder/7_rank_"
    assert (tmp_path / "runs" / "flight-recorder").is_dir()


def test_the_example_site_names_no_interface() -> None:
    setup = load_site("gpu").setup
    assert not any("IFNAME" in line for line in setup)
    text = (Path(__file__).parents[2] / "slurm" / "gpu.toml").read_text()
    assert "GLOO_SOCKET_IFNAME" in text
    assert tomllib.loads(text)["setup"] == setup


def test_fp32_is_whole_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    use_whole_fp32(torch.device("cpu"))
    assert torch.backends.cudnn.allow_tf32
    use_whole_fp32(torch.device("cuda", 0))
    assert not torch.backends.cudnn.allow_tf32
