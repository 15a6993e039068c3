"""Checks of one machine: versions, Faiss, the search, the file system, Slurm."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from ecgmatch_dist import config, keyed
from ecgmatch_dist.augment import ECGAugment, why_no_kernel
from ecgmatch_dist.bank.faiss_backends import check_faiss, has_faiss, has_gpu, load_faiss
from ecgmatch_dist.bank.search import choose_backend
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.distributed.devices import gpus_here, has_bf16, why_not
from ecgmatch_dist.doctor.findings import Finding, ok, refused, warning
from ecgmatch_dist.errors import UserError

VIEW_BOUND = 1e-4  # fp32: logarithms and sines may round otherwise
ORDERS = (2, 26)  # NCCL that knows NCCL_LAUNCH_ORDER_IMPLICIT (distributed/session.py)
ROOM = 10 << 30  # bytes: checkpoints of some runs
QUERIES, ROWS, DIM, K = 448, 66_000, 128, 5  # of the paper's run on one rank


def versions() -> Finding:
    """Python, torch and what it was built for; whether it can use the GPUs that are here."""
    found = f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    if torch.cuda.is_available():
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found += f", CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, nccl))}, driver {driver[0] if driver else '?'}"
        if nccl[:2] < ORDERS:
            remedy = (
                "install a newer torch, or set bank.overlap off: the bank and BatchNorm have communicators of their own"
            )
            return warning(
                "torch", f"{found}; NCCL before {'.'.join(map(str, ORDERS))} does not order communicators", remedy
            )
        return ok("torch", found)
    if seen := gpus_here():
        what, _, remedy = why_not().partition(": ")
        return refused("torch", f"{found}; {seen}, but {what}", remedy)
    return ok("torch", f"{found}, no GPU here")


def generation(device: torch.device) -> list[Finding]:
    """Whether torch has kernels for this generation of GPU: compiled for it, or code that the driver compiles."""
    if device.type != "cuda":
        return []
    own = torch.cuda.get_device_capability(device)
    built = [
        (kind, int(number[:-1]), int(number[-1])) for kind, number in map(_architecture, torch.cuda.get_arch_list())
    ]
    compiled = any(kind == "sm" and major == own[0] and minor <= own[1] for kind, major, minor in built)
    if compiled or any(kind == "compute" and (major, minor) <= own for kind, major, minor in built):
        return [ok("generation", f"compute capability {own[0]}.{own[1]}")]
    found = (
        f"torch has no kernels for compute capability {own[0]}.{own[1]}, only {' '.join(torch.cuda.get_arch_list())}"
    )
    return [refused("generation", found, "install a build of torch for this GPU")]


def _architecture(name: str) -> tuple[str, str]:
    """sm_90a -> sm, 90."""
    kind, _, number = name.partition("_")
    return kind, number.rstrip("af")


def precision(device: torch.device) -> Finding:
    if device.type != "cuda":
        return ok("precision", "fp32, on a CPU")
    if has_bf16(device):
        return ok("precision", "bf16")
    return warning("precision", "this GPU has no bf16 of its own", "nothing to do: runs take fp32, which is slower")


def views(device: torch.device) -> list[Finding]:
    """The kernel of views on GPUs against torch's operations: the small training computes in fp64, without it."""
    if device.type != "cuda":
        return []
    if why := why_no_kernel():
        remedy = "install gcc, libc6-dev, python3-dev (or set CC, CPATH), and torch's CUDA build, which brings Triton"
        return [warning("views", f"by torch's operations, several hundred launches a step more: {why}", remedy)]
    x = torch.randn(8, 12, 1024, generator=torch.Generator().manual_seed(0))
    keys, augment = keyed.row_keys(1, 2, 3, torch.arange(len(x))), ECGAugment(config.Augment(pipeline="sequential"))
    expected, found = (augment.strong(x.to(at), keys.to(at)).cpu() for at in (torch.device("cpu"), device))
    return [judge_views((found - expected).abs().max().item())]


def judge_views(worst: float) -> Finding:
    """`worst`: the largest difference of a view by the kernel from one by torch's operations."""
    text = f"one kernel; differs from torch's operations by {worst:.1e}"
    if not worst <= VIEW_BOUND:  # also NaN
        return refused("views", text, "uninstall triton: torch's operations take its place; report it with --json")
    return ok("views", text)


def faiss_build(device: torch.device) -> Finding:
    """Which build of Faiss, and whether it fits the device."""
    try:
        check_faiss()
        faiss = load_faiss() if has_faiss() else None
    except UserError as error:
        what, _, remedy = str(error).partition("; ")
        return refused("Faiss", what, remedy)
    extra = "gpu" if device.type == "cuda" else "cpu"
    if faiss is None:
        return warning("Faiss", "not installed: torch searches the bank", f"pip install 'ecgmatch-dist[{extra}]'")
    if device.type == "cuda" and not has_gpu():
        remedy = "pip uninstall --yes faiss-cpu && pip install 'ecgmatch-dist[gpu]'"
        return warning("Faiss", f"{faiss.__version__} sees no GPU: torch searches the bank", remedy)
    return ok("Faiss", f"{faiss.__version__}, {'GPU' if has_gpu() else 'CPU'}")


def search(device: torch.device, rows: int = ROWS) -> Finding:
    """Each backend against the reference, timed."""
    choice = choose_backend(QUERIES, rows, DIM, K, device)
    found = f"{QUERIES} queries in {rows:,} rows by {choice}"
    if choice.wrong:
        return refused("search", found, f"reinstall {', '.join(choice.wrong)}, or set bank.backend = torch")
    return ok("search", found)


def file_system(runs: Path) -> list[Finding]:
    """What recovery rests on, in the folder of runs: files made once, renamed over others, linked and appended to."""
    folder = runs / f".doctor-{os.getpid()}"
    remedy = "choose another --runs, on a file system that can do this"
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        return [refused("files", f"{folder}: {error.strerror}", "choose a folder that you may write to with --runs")]
    a, b = folder / "a", folder / "b"
    out = [storage(folder)]
    try:
        a.write_text("1")
        b.write_text("2")
        a.replace(b)
        good = b.read_text() == "1" and not a.exists()
        out.append(ok("rename", "replaces a file") if good else refused("rename", "does not replace a file", remedy))
        try:
            os.close(os.open(b, os.O_CREAT | os.O_EXCL))
            out.append(refused("exclusive", "a file that exists was made again", remedy))
        except FileExistsError:
            out.append(ok("exclusive", "of two copies of a run, one makes a file"))
        try:
            os.link(b, a)
            out.append(ok("links", "hard links work"))
        except OSError as error:
            out.append(warning("links", f"no hard links ({error.strerror})", "nothing to do: files are copied instead"))
        for text in "34":
            handle = os.open(b, os.O_WRONLY | os.O_APPEND)
            os.write(handle, text.encode())
            os.fsync(handle)
            os.close(handle)
        good = b.read_text() == "134"
        out.append(ok("append", "lines are added") if good else refused("append", "appended bytes are lost", remedy))
    except OSError as error:
        out.append(refused("files", f"{folder}: {error}", remedy))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return out


def storage(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> Finding:
    """The kind of file system, and the room that is left."""
    places = [line.split()[1:3] for line in mounts.read_text().splitlines()] if mounts.is_file() else []
    inside = [(place, kind) for place, kind in places if folder.resolve().is_relative_to(place.replace("\\040", " "))]
    kind = max(inside, key=lambda one: len(one[0]), default=("", "unknown"))[1]
    free = shutil.disk_usage(folder).free
    found = f"{kind}, {free / 2**30:,.1f} GiB free"
    if free < ROOM:
        return warning("storage", found, "make room, or choose another --runs: a full disk ends a run")
    if kind.startswith("nfs"):
        found += "; nodes may see each other's files late"
        return warning("storage", found, "nothing to do if `shared files` is ok; else mount with lookupcache=positive")
    if kind in ("tmpfs", "ramfs"):
        return warning("storage", f"{found}; lost at the next start", "choose another --runs for runs that you keep")
    return ok("storage", found)


def shards_rate(shards: str, count: int = 512) -> Finding:
    """Random reading of shards, with one thread."""
    names = sorted(path.parent.name for path in Path(shards).glob("*/dataset.json"))
    if not names:
        return refused(
            "shards", f"{shards}: no database here", "give --shards the folder that `ecgmatch shards build` made"
        )
    store = ShardStore(shards, names[:1])
    rows = np.random.default_rng(0).integers(len(store), size=count)
    begin = time.perf_counter()
    store.read(rows)
    seconds = time.perf_counter() - begin
    return ok("shards", f"{names[0]}: {count / seconds:,.0f} recordings per second and thread, in random order")


def slurm() -> list[Finding]:
    """What the cluster's settings do to a run that is pre-empted or needs longer than its time limit."""
    if not shutil.which("scontrol"):
        return [ok("Slurm", "not here")]
    text = _output("scontrol", "show", "config")
    if not text:
        return [warning("Slurm", "scontrol does not answer", "ask on a login or compute node of the cluster")]
    settings = dict(_setting(line) for line in text.splitlines() if "=" in line)
    return [*judge_slurm(settings), *time_limits(_output("scontrol", "show", "partition", "--oneliner"))]


def judge_slurm(settings: dict[str, str]) -> list[Finding]:
    """`settings`: what `scontrol show config` prints."""
    out = []
    if "preempt_send_user_signal" in settings.get("SlurmctldParameters", ""):
        out.append(ok("pre-emption", "is announced by a signal"))
    else:
        remedy = (
            "administrator: SlurmctldParameters=preempt_send_user_signal; else a run resumes from its last checkpoint"
        )
        out.append(warning("pre-emption", "comes without a warning signal", remedy))
    if settings.get("JobRequeue", "1") == "1":
        out.append(ok("requeue", "jobs may be queued again"))
    else:
        out.append(
            warning("requeue", "JobRequeue=0", "administrator: JobRequeue=1; else submit the sweep again by hand")
        )
    out.append(ok("arrays", f"MaxArraySize={settings.get('MaxArraySize', '?')}; larger sweeps become several arrays"))
    return out


def time_limits(text: str) -> list[Finding]:
    """`text`: what `scontrol show partition --oneliner` prints."""
    partitions = [dict(_setting(word) for word in line.split() if "=" in word) for line in text.splitlines()]
    limits = [f"{one['PartitionName']} {one.get('MaxTime', '?')}" for one in partitions if "PartitionName" in one]
    remedy = "ask for less than the limit in the site file: Slurm ends a job that asks for more before it starts"
    if not limits:
        return [warning("time limit", "scontrol shows no partition", remedy)]
    return [ok("time limit", f"{', '.join(limits)}; a longer run is saved, stopped and queued again")]


def _setting(line: str) -> tuple[str, str]:
    name, _, value = line.partition("=")
    return name.strip(), value.strip()


def _output(*command: str) -> str:
    """The standard output of a command; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
