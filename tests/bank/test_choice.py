"""Which backend searches: the automatic choice, and what is refused."""

import importlib.metadata
import time
from pathlib import PurePosixPath
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ecgmatch_dist.bank import faiss_backends, search
from ecgmatch_dist.bank.faiss_backends import check_faiss, load_faiss
from ecgmatch_dist.bank.search import available, choose_backend, require_backend
from ecgmatch_dist.errors import UserError

CPU = torch.device("cpu")
EXACT = ["torch", "faiss-cpu"]


def test_choice() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    begin = time.perf_counter()
    choice = choose_backend(16, 3000, 16, 5, CPU)
    assert 0 < sum(choice.milliseconds.values()) < 1e3 * (time.perf_counter() - begin)
    assert choice.name in EXACT
    assert set(choice.milliseconds) == set(EXACT)
    assert choice.name in str(choice)
    assert "ms" in str(choice)
    assert torch.equal(torch.get_rng_state(), before)
    assert choose_backend(16, 0, 16, 5, CPU).name == "torch"  # a rank without rows
    assert choose_backend(16, 3, 16, 5, CPU).name in EXACT  # a block smaller than K


def test_the_fastest_by_the_median_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the best time nor by the mean."""
    seconds = iter([0.003, 0.0001, 0.004, 0.002, 0.001, 0.009])
    monkeypatch.setattr(search, "_seconds", lambda *_: next(seconds))
    choice = choose_backend(16, 3000, 16, 5, CPU)
    assert choice.milliseconds == pytest.approx({"torch": 3.0, "faiss-cpu": 2.0})
    assert str(choice) == "faiss-cpu (torch 3.0 ms, faiss-cpu 2.0 ms)"


def test_a_wrong_backend_is_not_chosen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def wrong(q: Tensor, z: Tensor, m: int) -> tuple[Tensor, Tensor]:
        return q.new_full((len(q), m), -2.0), torch.arange(m).expand(len(q), m)

    monkeypatch.setitem(search.BACKENDS, "faiss-cpu", wrong)
    choice = choose_backend(16, 3000, 16, 5, CPU)
    assert choice.name == "torch"
    assert choice.wrong == ("faiss-cpu",)
    assert "NOT USED" in str(choice)
    assert "faiss-cpu" in caplog.text


def test_without_faiss_torch_searches_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_backend(16, 3000, 16, 5, CPU, only="faiss").name == "faiss-cpu"
    monkeypatch.setattr(search, "has_faiss", lambda: False)
    choice = choose_backend(16, 3000, 16, 5, CPU, only="faiss")
    assert str(choice) == "torch (Faiss is not installed)"
    assert "pip install 'ecgmatch-dist[cpu]'" in caplog.text


def test_a_wrong_faiss_is_replaced_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        search.BACKENDS, "faiss-cpu", lambda q, z, m: (q.new_zeros(len(q), m), torch.zeros(len(q), m).long())
    )
    choice = choose_backend(16, 3000, 16, 5, CPU, only="faiss")
    assert choice.name == "torch"
    assert choice.wrong == ("faiss-cpu",)


def test_two_builds_of_faiss_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Build(NamedTuple):
        name: str
        files: list[PurePosixPath] | None

    def installed(*builds: Build) -> None:
        monkeypatch.setattr(importlib.metadata, "distributions", lambda: list(builds))

    check_faiss()
    files = [PurePosixPath("faiss/__init__.py")]
    installed(Build("faiss-cpu", files), Build("faiss-cpu", files), Build("faiss-notes", None), Build("torch", files))
    check_faiss()
    installed(Build("faiss-gpu", files), Build("numpy", None), Build("faiss-cpu", files))
    remedy = "pip uninstall --yes faiss-cpu faiss-gpu && pip install faiss-gpu"
    with pytest.raises(UserError, match=f"faiss-cpu, faiss-gpu.*{remedy}"):
        check_faiss()


def test_a_backend_that_cannot_work_here() -> None:
    require_backend("torch", CPU)
    require_backend("faiss-cpu", CPU)
    with pytest.raises(UserError, match=r"^bank\.backend = 'faiss-gpu': the bank is not on a GPU; install faiss-gpu"):
        require_backend("faiss-gpu", CPU)
    with pytest.raises(UserError, match=r"bank\.backend = 'faiss-cpu'"):
        require_backend("faiss-cpu", torch.device("cuda"))


def test_faiss_that_is_set_but_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faiss_backends, "has_faiss", lambda: False)
    load_faiss.cache_clear()
    require_backend("torch", CPU)
    with pytest.raises(UserError, match="Faiss is not installed"):
        require_backend("faiss-cpu", CPU)


def test_backends_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    assert available(CPU) == EXACT
    assert available(gpu) == ["torch"]  # none here
    monkeypatch.setattr(search, "has_gpu", lambda: True)
    assert available(gpu) == ["torch", "faiss-gpu", "faiss-gpu-index"]
    assert available(CPU) == EXACT
    monkeypatch.setattr(search, "has_faiss", lambda: False)
    assert available(gpu) == available(CPU) == ["torch"]
