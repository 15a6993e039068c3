"""What Faiss is told on a GPU. Its kernels are replaced by Faiss's own search on the CPU, on the pointers that it is given."""

import importlib
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ecgmatch_dist.bank import faiss_backends
from ecgmatch_dist.bank.faiss_backends import ResidentIndex, temporary_memory
from ecgmatch_dist.bank.search import BACKENDS, exact_search, normalise, reference_search

faiss = pytest.importorskip("faiss")
STREAM = 77


class FakeResources:
    """Faiss's resources, which note what they were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.stream = 0

    def setPinnedMemory(self, count: int) -> None:
        self.asked.append(("pinned", count))

    def setTempMemory(self, count: int) -> None:
        self.asked.append(("temporary", count))

    def getDefaultStream(self, device: int) -> int:
        return self.stream

    def setDefaultStream(self, device: int, stream: int) -> None:
        self.stream = stream


@pytest.fixture
def resources(monkeypatch: pytest.MonkeyPatch) -> FakeResources:
    """A GPU on which nothing was searched before: Faiss does not know torch yet."""
    made = FakeResources()
    for name in [name for name in sys.modules if name.startswith("faiss.contrib.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(faiss, "knn_gpu", importlib.import_module("faiss.gpu_wrappers").knn_gpu)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=STREAM))
    fakes = {"StandardGpuResources": lambda: made, "GpuDistanceParams": SimpleNamespace, "bfKnn": search_on_the_cpu}
    fakes |= {"DistanceDataType_F32": 1, "IndicesDataType_I64": 1, "cast_integer_to_cudastream_t": int}
    for name, value in fakes.items():
        monkeypatch.setattr(faiss, name, value, raising=False)
    faiss_backends._gpu_resources.cache_clear()
    yield made
    faiss_backends._gpu_resources.cache_clear()
    ResidentIndex.on_gpu.clear()


def search_on_the_cpu(resources: FakeResources, args: Any) -> None:
    assert args.device == -1, "the current device"
    assert resources.stream == STREAM, "the search must follow the work that torch has queued"
    assert args.vectorsRowMajor, "the bank is searched where it is"
    sizes = args.dims, args.numQueries, args.numVectors, args.k
    faiss.knn_inner_product(args.queries, args.vectors, *sizes, args.outDistances, args.outIndices)


def rows(n: int, seed: int, dim: int = 16) -> torch.Tensor:
    return normalise(torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)))


def test_the_first_search_on_a_gpu_takes_tensors(resources: FakeResources) -> None:
    """`faiss.knn_gpu` is for NumPy arrays until faiss.contrib.torch_utils is imported."""
    q, z = rows(30, 1), rows(900, 2)
    found, expected = exact_search(q, z, 5, BACKENDS["faiss-gpu"]), reference_search(q, z, 5)
    assert torch.equal(found.rows, expected.rows)
    assert torch.equal(found.scores, expected.scores)
    assert resources.stream == 0, "given back"


def test_memory_is_reserved_once(resources: FakeResources) -> None:
    """As much as the whole batch needs; the second look, with fewer queries and more candidates, needs no more."""
    for queries, candidates in ((448, 13), (100, 133), (448, 133), (448, 13)):
        BACKENDS["faiss-gpu"](rows(queries, 1), rows(2000, 2), candidates)
    assert resources.asked == [("pinned", 0), ("temporary", temporary_memory(448, 2000, 16))]


def test_a_resident_index_uses_the_kernels_that_are_known(
    resources: FakeResources, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def flat(given: FakeResources, dim: int, options: Any) -> Any:
        assert given is resources
        made.append(options)
        return faiss.IndexFlatIP(dim)

    monkeypatch.setattr(faiss, "GpuIndexFlatConfig", lambda: SimpleNamespace(use_cuvs=True), raising=False)
    monkeypatch.setattr(faiss, "GpuIndexFlatIP", flat, raising=False)
    q, z = rows(30, 1), rows(900, 2)
    for _ in range(2):
        assert torch.equal(exact_search(q, z, 5, BACKENDS["faiss-gpu-index"]).rows, reference_search(q, z, 5).rows)
    assert made == [SimpleNamespace(device=0, use_cuvs=False)]


@pytest.mark.parametrize("dim", [16, 32, 33, 128])
@pytest.mark.parametrize("count", [1000, 75_000, 262_144, 1_250_000, 10_000_000])
@pytest.mark.parametrize(("queries", "margin"), [(56, 8), (448, 128), (200, 2000), (3584, 128)])
def test_what_a_search_takes_fits(queries: int, margin: int, count: int, dim: int) -> None:
    """The temporaries of `runDistance` in Faiss's Distance.cu on a GPU of more than 8 GB, each rounded up to 256 bytes: 1 GiB
    for two tiles, of 512 queries or, with few features, 1,024."""
    preferred = 1024 if dim <= 32 else 512
    height, width = min(preferred, queries), min((1 << 30) // (2 * 4) // preferred, count)
    candidates = height * -(-count // width) * (5 + margin)
    sizes = [4 * queries, *2 * [4 * height * width], *2 * [4 * candidates], *2 * [8 * candidates]]
    needed = sum(-(-size // 256) * 256 for size in sizes)
    assert needed <= temporary_memory(queries, count, dim, 5 + margin) <= 1536 << 20, "Faiss reserves 1.5 GiB at most"
