"""Faiss as a backend of the bank's search: `faiss.knn` on a CPU; on a GPU `knn_gpu` or a resident index.

No GPU index of Faiss changes rows in place. So the bank's own memory is searched (`knn_gpu`), or an index is filled from
it at each search: the copy inside the device is cheap, and which of the two is faster is measured at the start of a run.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ecgmatch_dist.errors import UserError

TILE_BYTES = 1 << 29  # of one of the two tiles of scores that Faiss computes at a time; less on GPUs of 8 GB
CANDIDATES = 256  # per query and tile, reserved at once: the first two looks of bank/search.py take fewer


def has_faiss() -> bool:
    """Whether Faiss is installed: the extra `cpu` or `gpu`."""
    return importlib.util.find_spec("faiss") is not None


def check_faiss() -> None:
    """Refuse two builds of Faiss: they overwrite each other's files, and the mix crashes or gives wrong results."""
    builds = [build for build in importlib.metadata.distributions() if (build.name or "").lower().startswith("faiss")]
    owners = sorted({build.name for build in builds if any(path.parts[0] == "faiss" for path in build.files or ())})
    if len(owners) > 1:
        keep = next((name for name in owners if "gpu" in name), owners[0])
        raise UserError(
            f"{len(owners)} builds of Faiss are installed ({', '.join(owners)}): they overwrite each other; "
            f"pip uninstall --yes {' '.join(owners)} && pip install {keep}"
        )


@cache
def load_faiss() -> Any:
    """Faiss, imported after torch, and set to use BLAS also for few queries (2-4 times faster)."""
    check_faiss()
    if not has_faiss():
        raise UserError(
            "Faiss is not installed: pip install 'ecgmatch-dist[cpu]' (or [gpu]), or set bank.backend to torch"
        )
    try:
        import faiss
    except ImportError as error:  # a library of CUDA is missing, or of another version
        raise UserError(
            f"Faiss is installed but does not load ({str(error).splitlines()[0]}); "
            "install the extra cpu or gpu again with pip's --force-reinstall, or set bank.backend to torch"
        ) from error

    faiss.cvar.distance_compute_blas_threshold = 1
    faiss.cvar.distance_compute_blas_database_bs = 4096
    return faiss


def has_gpu() -> bool:
    """Whether this build of Faiss sees a GPU. It is asked only where torch sees one: without a driver, or with one that is too
    old, Faiss does not answer 0 but ends the process."""
    return torch.cuda.is_available() and bool(load_faiss().get_num_gpus() > 0)


def load_faiss_for_tensors() -> Any:
    """Faiss that takes torch tensors and works on torch's current stream. The import replaces its functions: look them up after
    it."""
    faiss = load_faiss()
    importlib.import_module("faiss.contrib.torch_utils")
    return faiss


def faiss_threads() -> Any:
    """Faiss with torch's number of threads: it has its own OpenMP, which would use every core."""
    faiss = load_faiss()
    faiss.omp_set_num_threads(torch.get_num_threads())
    return faiss


def faiss_cpu_candidates(q: Tensor, z: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """`faiss.knn` on the memory of the bank: there is no index to update."""
    faiss = faiss_threads()
    scores, rows = faiss.knn(q.numpy(), z.numpy(), m, metric=faiss.METRIC_INNER_PRODUCT)
    return torch.from_numpy(scores), torch.from_numpy(rows)


def temporary_memory(queries: int, rows: int, dim: int, candidates: int = CANDIDATES) -> int:
    """Bytes that a search takes from Faiss's temporary memory: two tiles of fp32 scores, and their candidates (fp32 scores and
    int64 rows). Faiss chooses the tiles without regard to what is reserved (`chooseTileSize` in its DistanceUtils.cuh,
    `runDistance` in Distance.cu). With less, every search allocates and frees on the device, and waits for it each time."""
    height = 1024 if dim <= 32 else 512
    tile_rows, tile_columns = min(queries, height), min(rows, TILE_BYTES // (4 * height))
    tiles = -(-rows // max(1, tile_columns))
    temporaries = [4 * tile_rows * tile_columns, (4 + 8) * tile_rows * tiles * max(candidates, CANDIDATES)]
    return 2 * sum(temporaries) + 4 * queries + (1 << 16)  # the norms of the queries, and alignment


class Resources:
    """Faiss's memory on one GPU: as much as the largest search so far needed, instead of 1.5 GB; nothing pinned."""

    def __init__(self) -> None:
        self.faiss = load_faiss().StandardGpuResources()
        self.faiss.setPinnedMemory(0)
        self.reserved = 0

    def reserve(self, count: int) -> Any:
        if count > self.reserved:
            self.faiss.setTempMemory(count)
            self.reserved = count
        return self.faiss


@cache
def _gpu_resources(device: int) -> Resources:
    return Resources()


def _reserved(q: Tensor, z: Tensor, m: int) -> Any:
    return _gpu_resources(torch.cuda.current_device()).reserve(temporary_memory(len(q), len(z), z.shape[1], m))


def faiss_gpu_candidates(q: Tensor, z: Tensor, m: int) -> tuple[Tensor, Tensor]:
    """`faiss.knn_gpu` on the memory of the bank, on torch's current stream."""
    faiss = load_faiss_for_tensors()
    with torch.cuda.device(z.device):  # on another current device, Faiss is silently wrong
        scores, rows = faiss.knn_gpu(_reserved(q, z, m), q.contiguous(), z, m, metric=faiss.METRIC_INNER_PRODUCT)
    return scores, rows


def _on(device: int, options: Any) -> Any:
    """Options of an index on this GPU, by Faiss's own kernels: their tiles and rounding are known, those of cuVS are not."""
    options.device, options.use_cuvs = device, False
    return options


class ResidentIndex:
    """A flat index that stays on the device and is filled from the bank at each search."""

    on_gpu: "dict[int, ResidentIndex]" = {}  # noqa: RUF012  # by device

    def __init__(self, make: Callable[[int], Any]) -> None:
        """`make`: number of features -> an empty flat index for inner products."""
        self.make = make
        self.index: Any = None

    def __call__(self, q: Tensor, z: Tensor, m: int) -> tuple[Tensor, Tensor]:
        load_faiss_for_tensors()
        if self.index is None or self.index.d != z.shape[1]:
            self.index = self.make(z.shape[1])
        self.index.reset()
        self.index.add(z.contiguous())
        scores, rows = self.index.search(q.contiguous(), m)
        return scores, rows

    @classmethod
    def search_on_gpu(cls, q: Tensor, z: Tensor, m: int) -> tuple[Tensor, Tensor]:
        """`GpuIndexFlatIP` on the bank's device."""
        faiss = load_faiss()
        with torch.cuda.device(z.device):
            number = torch.cuda.current_device()
            resources = _reserved(q, z, m)

            def make(dim: int) -> Any:
                return faiss.GpuIndexFlatIP(resources, dim, _on(number, faiss.GpuIndexFlatConfig()))

            return cls.on_gpu.setdefault(number, cls(make))(q, z, m)


def gpu_lists(device: torch.device, dim: int, lists: int) -> Any:
    """An empty inverted-list index for inner products on a GPU."""
    faiss = load_faiss()
    with torch.cuda.device(device):
        number = torch.cuda.current_device()
        options = _on(number, faiss.GpuIndexIVFFlatConfig())
        resources = _gpu_resources(number).reserve(temporary_memory(512, 1 << 18, dim))  # for k-means
        return faiss.GpuIndexIVFFlat(resources, dim, lists, faiss.METRIC_INNER_PRODUCT, options)
