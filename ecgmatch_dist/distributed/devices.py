"""Which device a rank computes on. A GPU that is there but cannot be used is an error, not a reason to compute on the CPU."""

import os
import shutil
import subprocess
import warnings
from typing import Literal

import torch

from ecgmatch_dist.errors import UserError

REMEDY = "or choose runtime.device = cpu"
SLURM = ("SLURM_GPUS_ON_NODE", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_NODE")


def pick_device(wanted: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    """This rank's device. If the launcher shows each rank only its own GPU, that has number 0."""
    if wanted == "cpu":
        return torch.device("cpu")
    with warnings.catch_warnings(record=True) as said:  # torch warns when the driver is too old
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    reason = "; ".join(str(warning.message).splitlines()[0] for warning in said)
    if wanted == "auto" and not usable:
        if seen := gpus_here():
            raise UserError(f"runtime.device = 'auto': {seen}, but {why_not(reason)}, {REMEDY}")
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise UserError(f"runtime.device = 'cuda': torch sees no GPU here: {why_not(reason)}, or choose cpu or auto")
    if count > 1 and local_rank >= count:
        raise UserError(f"local rank {local_rank}, but {count} GPUs on this node: start at most {count} ranks per node")
    return torch.device("cuda", local_rank if count > 1 else 0)


def gpus_here() -> str:
    """Who says that this machine has a GPU for this process; empty: nobody."""
    for name in SLURM:
        if os.environ.get(name, "").strip() not in ("", "0", "(null)"):
            return f"Slurm allotted GPUs ({name}={os.environ[name]})"
    if command := shutil.which("nvidia-smi"):
        try:
            done = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        lines = [line for line in done.stdout.splitlines() if line.startswith("GPU ")]
        if done.returncode == 0 and lines:
            return f"nvidia-smi sees {len(lines)} GPU{'s' * (len(lines) > 1)}"
    return ""


def why_not(reason: str = "") -> str:
    """Why torch cannot use the GPUs, and the remedy. `reason`: what torch said."""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built for CPUs only: install torch's CUDA build"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return (
            "CUDA_VISIBLE_DEVICES is empty and hides them: unset it, or ask for GPUs (gpus_per_node in the site file)"
        )
    return f"torch cannot use them ({reason or f'built for CUDA {torch.version.cuda}'}): update the driver"


def has_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16 itself: Ampere and newer. V100 and T4 only emulate it, without convolutions."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def use_whole_fp32(device: torch.device) -> None:
    """Convolutions of fp32 in fp32. By torch's default, GPUs of Ampere and newer round their inputs to 10 bits (TF32)."""
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False


def use_deterministic_algorithms() -> None:
    """On a GPU: only algorithms that give the same bits each time. Before the first product and the first collective."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # sums inside the switch, in the order of arrival
    torch.backends.cudnn.benchmark = False
    # Nothing here reads memory that was not written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
