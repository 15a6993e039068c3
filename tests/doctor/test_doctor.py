"""The doctor on a healthy machine, alone and under torchrun; then with each fault injected."""

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from ecgmatch_dist import augment
from ecgmatch_dist.bank import search
from ecgmatch_dist.bank.faiss_backends import load_faiss
from ecgmatch_dist.distributed import devices
from ecgmatch_dist.doctor import examine, machine, main, ranks, show
from ecgmatch_dist.doctor.findings import Finding, answered, careful, ok, refused
from ecgmatch_dist.doctor.ranks import Place, judge_places, largest_difference, shared_files, together
from ecgmatch_dist.errors import UserError
from tests.support.ranks import run_processes, run_threads

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*devices.SLURM, "SLURM_NTASKS", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def states(findings: list[Finding]) -> dict[str, str]:
    return {finding.what: finding.state for finding in findings}


def command(runs: Path, report: Path) -> list[str]:
    return ["--runs", str(runs), "--json", str(report), "--rows", "2000", "--device", "cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_healthy_machine(data: Path, tmp_path: Path, count: int) -> None:
    report = tmp_path / "report.json"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"] if count > 1 else []
    start = [sys.executable, *launcher, "-m", "ecgmatch_dist.doctor", *command(tmp_path / "runs", report)]
    start += ["--shards", str(data / "shards")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    done = subprocess.run(start, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = [Finding(**one) for one in json.loads(report.read_text())["findings"]]
    found = states(findings)
    expected = {
        "torch",
        "devices",
        "precision",
        "Faiss",
        "search",
        "training",
        "shared files",
        "rename",
        "exclusive",
        "append",
    }
    assert expected | {"links", "shards"} <= found.keys()
    assert "refused" not in found.values()
    training = next(finding for finding in findings if finding.what == "training")
    assert f"{count} against one process" in training.found
    assert ("all-to-all" in found) == (count > 1)
    assert "remedy" in done.stdout
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_refusal_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    with pytest.raises(SystemExit) as end:
        main(tmp_path / "runs", json=tmp_path / "report.json", rows=2000)
    assert end.value.code == 1
    (finding,) = json.loads((tmp_path / "report.json").read_text())["findings"]
    assert finding["state"] == "refused"
    assert "Slurm allotted GPUs" in finding["found"]
    assert "install torch's CUDA build" in finding["remedy"]


def test_ranks_that_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "2")
    findings = examine(tmp_path, "", "cpu", 2000)
    assert states(findings)["ranks"] == "refused"


def test_faiss(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.faiss_build(CPU).state == "ok"
    assert machine.faiss_build(CUDA).state == "warning"  # a build without GPUs, for a bank on a GPU
    assert "ecgmatch-dist[gpu]" in machine.faiss_build(CUDA).remedy
    monkeypatch.setattr(machine, "has_faiss", lambda: False)
    assert machine.faiss_build(CPU).state == "warning"

    def two() -> None:
        raise UserError("2 builds of Faiss are installed (a, b): they overwrite each other; pip uninstall --yes a b")

    monkeypatch.setattr(machine, "check_faiss", two)
    finding = machine.faiss_build(CPU)
    assert (finding.state, finding.remedy) == ("refused", "pip uninstall --yes a b")


def test_a_faiss_that_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a build for GPUs without its libraries: a sentence for a run, too."""
    (tmp_path / "faiss").mkdir()
    (tmp_path / "faiss/__init__.py").write_text("raise ImportError('libcublas.so.12: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "faiss"]:
        monkeypatch.delitem(sys.modules, name)
    load_faiss.cache_clear()
    try:
        finding = machine.faiss_build(CPU)
        with pytest.raises(UserError, match=r"does not load \(libcublas"):
            search.require_backend("faiss-cpu", CPU)
    finally:
        load_faiss.cache_clear()
    assert finding.state == "refused"
    assert "libcublas.so.12" in finding.found
    assert "--force-reinstall" in finding.remedy


def test_faiss_is_not_asked_for_gpus_where_torch_sees_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver, or with one that is too old, a build for GPUs ends the process."""
    monkeypatch.setattr(load_faiss(), "get_num_gpus", lambda: pytest.fail("asked"))
    assert machine.faiss_build(CPU).state == "ok"
    assert machine.faiss_build(CUDA).state == "warning"
    assert search.available(CUDA) == ["torch"]


def test_a_nccl_that_does_not_order_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for version, state in (((2, 21, 5), "warning"), ((2, 26, 2), "ok"), ((2, 30, 1), "ok")):
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda version=version: version)
        assert machine.versions().state == state, version


def test_a_search_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.search(CPU, 2000).state == "ok"
    monkeypatch.setitem(search.BACKENDS, "faiss-cpu", lambda q, z, m: (q[:, :m] * 0, torch.zeros(len(q), m).long()))
    finding = machine.search(CPU, 2000)
    assert finding.state == "refused"
    assert "faiss-cpu" in finding.remedy


def test_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.precision(CPU).state == "ok"
    for native, state in ((True, "ok"), (False, "warning")):
        monkeypatch.setattr(machine, "has_bf16", lambda device, native=native: native)
        assert machine.precision(CUDA).state == state


def test_views_without_their_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A slim image has no C compiler, which Triton calls at its first kernel."""
    assert machine.views(CPU) == []
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(augment.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(augment.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = machine.views(CUDA)
    assert finding.state == "warning"
    assert "Triton needs a C compiler" in finding.found
    assert "gcc" in finding.remedy
    monkeypatch.setenv("CC", "cc")
    assert augment.why_no_kernel() == ""
    monkeypatch.setattr(augment.importlib.util, "find_spec", lambda name: None)
    assert augment.why_no_kernel() == "Triton is not installed"


def test_views_without_the_headers_of_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Debian's python3 comes without them, and gcc alone cannot make what Triton asks for."""
    for name in ("CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(augment.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(augment.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    (finding,) = machine.views(CUDA)
    assert finding.state == "warning"
    assert f"there is no {tmp_path}/Python.h" in finding.found
    assert "python3-dev" in finding.remedy
    (tmp_path / "module").mkdir()
    (tmp_path / "module" / "Python.h").touch()
    monkeypatch.setenv("CPATH", f"{tmp_path}/other:{tmp_path}/module")
    assert augment.why_no_kernel() == ""


def test_views_whose_kernel_is_wrong() -> None:
    worst = {2e-7: "ok", 0.1: "refused", float("nan"): "refused"}
    assert {value: machine.judge_views(value).state for value in worst} == worst


def no(*_: Any, **__: Any) -> None:
    raise OSError(1, "Operation not permitted")


@pytest.mark.parametrize(
    ("owner", "name", "fault", "what", "state"),
    [
        (os, "link", no, "links", "warning"),
        (Path, "replace", no, "files", "refused"),
        (Path, "replace", lambda *_: None, "rename", "refused"),
        (os, "fsync", no, "files", "refused"),
        (os, "write", lambda *_: 0, "append", "refused"),
        (Path, "mkdir", no, "files", "refused"),
    ],
)
def test_a_file_system_that_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Any, what: str, state: str
) -> None:
    assert set(states(machine.file_system(tmp_path)).values()) - {"ok"} <= {"warning"}  # of a machine without room
    monkeypatch.setattr(owner, name, fault)
    assert states(machine.file_system(tmp_path))[what] == state


def test_shards(data: Path, tmp_path: Path) -> None:
    assert machine.shards_rate(str(data / "shards")).state == "ok"
    assert machine.shards_rate(str(tmp_path)).state == "refused"


def test_slurm() -> None:
    good = {"SlurmctldParameters": "preempt_send_user_signal", "JobRequeue": "1", "MaxArraySize": "1001"}
    assert set(states(machine.judge_slurm(good)).values()) == {"ok"}
    bad = states(machine.judge_slurm({"SlurmctldParameters": "(null)", "JobRequeue": "0"}))
    assert (bad["pre-emption"], bad["requeue"]) == ("warning", "warning")


def test_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    good = [Place(r, f"n{r // 2}", f"10.0.0.{r // 2}", f"cuda:{r % 2} A100", f"gpu{r}") for r in range(4)]
    assert states(judge_places(good)) == {"devices": "ok"}
    assert "rank 3 n1 cuda:1" in judge_places(good)[0].found
    same = [*good[:3], good[3]._replace(gpu="gpu2")]
    assert states(judge_places(same)) == {"devices": "refused"}
    assert "ranks [2, 3] share one GPU on n1" in judge_places(same)[0].found
    mixed = [*good[:3], good[3]._replace(device="cuda:1 V100")]
    assert states(judge_places(mixed)) == {"devices": "warning"}
    loop = [one._replace(address="127.0.1.1") for one in good]
    assert states(judge_places(loop))["interface"] == "refused"
    assert "GLOO_SOCKET_IFNAME" in judge_places(loop)[1].remedy


def test_a_training_that_differs() -> None:
    one = {"w": torch.ones(3, dtype=torch.float64)}
    assert largest_difference(one, one) == 0
    assert largest_difference(one, {"w": one["w"] * (1 + 1e-6)}) > ranks.BOUND
    assert largest_difference(one, {"w": one["w"] * float("nan")}) > ranks.BOUND


def _training(rank: int, world: int) -> Finding:
    """Local instead of global statistics on all ranks."""
    torch.set_num_threads(1)
    from ecgmatch_dist import learner

    learner.convert_batchnorm = lambda model, mode: model  # type: ignore[assignment]
    return ranks.training(ranks.Ranks(rank, world, rank, world, CPU))


@pytest.mark.slow
def test_a_training_with_other_statistics_is_refused() -> None:
    """On three ranks: the batch is one that they divide."""
    assert run_processes(3, _training, timeout=200)[0].state == "refused"


def test_files_that_other_ranks_do_not_see(tmp_path: Path) -> None:
    def body(rank: int, world: int, shared: bool) -> Finding:
        folder = tmp_path if shared else tmp_path / str(rank)
        return shared_files(ranks.Ranks(rank, world, rank, world, CPU), folder, patience=0.5)

    assert [one.state for one in run_threads(2, body, True)] == ["ok", "ok"]
    assert [one.state for one in run_threads(2, body, False)] == ["refused", "refused"]


def _together(rank: int, world: int) -> list[Finding]:
    import torch.distributed as dist

    findings = [ok("search", "fine") if rank != 2 else refused("search", "wrong", "reinstall")]
    return together(ranks.Ranks(rank, world, rank, world, CPU), dist.new_group(backend="gloo"), findings)


@pytest.mark.slow
def test_a_fault_of_another_rank_is_shown() -> None:
    results = run_processes(3, _together, timeout=200)
    assert results[0] == results[1] == results[2]
    assert results[0][1] == refused("search", "rank 2: wrong", "reinstall")


SCRIPT = """
import os
import sys
import time
from pathlib import Path

import ecgmatch_dist.doctor as doctor
from ecgmatch_dist.doctor import machine, ranks
from ecgmatch_dist.doctor.findings import ok

def network(here, hosts):
    if here.rank == 1 or "{fault}" == "both fail":
        raise RuntimeError("NCCL error: no interface")
    time.sleep(1000)

def slowly(findings, json, show=doctor.show):
    time.sleep(8 * (os.environ["RANK"] == "0"))
    show(findings, json)

doctor.PATIENCE, ranks.network, doctor.show = 15.0, network, slowly
machine.search = lambda *_: ok("search", "")
doctor.main(Path(sys.argv[1]), device="cpu", json=Path(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "found"),
    [("one hangs", "no answer for 15 s"), ("both fail", "RuntimeError: NCCL error: no interface")],
)
def test_the_table_is_shown_before_a_launcher_ends_all_ranks(fault: str, found: str, tmp_path: Path) -> None:
    """Rank 1 fails in a check; rank 0 hangs in it, as in a collective of NCCL, or fails too and needs time for its table."""
    report, script = tmp_path / "report.json", tmp_path / "script.py"
    script.write_text(SCRIPT.replace("{fault}", fault))
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    start += [str(tmp_path / "runs"), str(report)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(start, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    finding = next(one for one in json.loads(report.read_text())["findings"] if one["what"] == "network")
    assert (finding["state"], finding["found"]) == ("refused", found)
    assert "rank 1 on" in done.stderr
    assert "network: RuntimeError: NCCL error: no interface" in done.stderr


def test_a_check_that_takes_too_long() -> None:
    given_up: list[Finding] = []
    end = Event()
    with answered("network", 0.05, lambda finding: (given_up.append(finding), end.set())):
        assert end.wait(20)
    assert states(given_up) == {"network": "refused"}
    with answered("network", 0.05, given_up.append):
        pass
    assert len(given_up) == 1


def test_the_table_shows_remedies_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Words in brackets are no markup."""
    monkeypatch.setenv("COLUMNS", "200")
    finding = refused("Faiss", "no", "pip install 'ecgmatch-dist[gpu]'")
    show([finding], tmp_path / "report.json")
    assert "pip install 'ecgmatch-dist[gpu]'" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "3")
    show([ok("torch", ""), finding], tmp_path / "report.json")
    said = capsys.readouterr()
    assert (said.out, said.err.count("rank 3 on")) == ("", 1)


def test_a_gpu_for_one_process_only() -> None:
    busy = "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCompile with ..."
    assert ranks.judge_alone(busy).state == "warning"
    assert ranks.judge_alone("ImportError: no module").state == "refused"


def test_an_unexpected_error_is_a_finding() -> None:
    assert careful("x", lambda: [1 / 0], "y") == [refused("x", "ZeroDivisionError: division by zero", "y")]  # type: ignore[list-item]


def test_a_gpu_that_torch_has_no_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.generation(CPU) == []
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90a"])
    for own, state in (((8, 6), "ok"), ((9, 0), "ok"), ((7, 0), "refused"), ((12, 0), "refused")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, own=own: own)
        assert states(machine.generation(CUDA)) == {"generation": state}, own
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "compute_90"])  # the driver compiles for 12.0
    assert states(machine.generation(CUDA)) == {"generation": "ok"}


def test_slow_links() -> None:
    for rate, inside, state in (
        (3.0, True, "warning"),
        (3.0, False, "ok"),
        (1.0, False, "warning"),
        (50.0, True, "ok"),
    ):
        assert ranks.judge_rate("all-reduce", "all ranks", rate, inside, CUDA).state == state
    assert ranks.judge_rate("all-reduce", "all ranks", 0.1, False, CPU).state == "ok"
    assert "InfiniBand" in ranks.judge_rate("all-reduce", "all ranks", 1.0, False, CUDA).remedy


@pytest.mark.parametrize(("kind", "state"), [("ext4", "ok"), ("nfs4", "warning"), ("tmpfs", "warning")])
def test_kinds_of_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, state: str) -> None:
    monkeypatch.setattr(machine, "ROOM", 0)
    folder = tmp_path / "my runs"
    folder.mkdir()
    mounts = tmp_path / "mounts"
    place = str(folder).replace(" ", "\\040")
    mounts.write_text(f"/dev/a / xfs rw 0 0\nserver:/b {place} {kind} rw 0 0\n")
    finding = machine.storage(folder, mounts)
    assert (finding.state, finding.found.split(",")[0]) == (state, kind)
    monkeypatch.setattr(machine, "ROOM", 1 << 60)
    assert "make room" in machine.storage(folder, mounts).remedy


def test_time_limits() -> None:
    text = "PartitionName=gpu MaxTime=2-00:00:00 State=UP\nPartitionName=cpu MaxTime=UNLIMITED State=UP\n"
    assert machine.time_limits(text)[0].found.startswith("gpu 2-00:00:00, cpu UNLIMITED")
    assert states(machine.time_limits("")) == {"time limit": "warning"}


def test_a_check_that_fails_ends_the_checks_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> list[Finding]:
        raise RuntimeError("no interface")

    monkeypatch.setattr(ranks, "network", broken)
    monkeypatch.setattr(machine, "search", lambda *_: ok("search", ""))
    found = states(examine(tmp_path, "", "cpu", 2000))
    assert found["network"] == "refused"
    assert "training" not in found
    assert found["rename"] == "ok"
