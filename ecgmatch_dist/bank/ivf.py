"""Approximate search for banks of tens of millions of rows: a Faiss IVF index that checks its own recall. Never the default.

Neighbours depend on the number of ranks and on restarts (which rebuild the index). Those of exact backends do not.
"""

import logging
import math
from typing import Any

import torch
from torch import Tensor

from ecgmatch_dist.bank.faiss_backends import faiss_threads, gpu_lists, has_gpu, load_faiss_for_tensors
from ecgmatch_dist.bank.search import (
    Candidates,
    best_order,
    canonical_scores,
    exact_search,
    torch_candidates,
)

IMBALANCE = 8.0  # longest list / mean list; above this, the centroids are stale and the search is slow
STALE = 0.125  # share of rows written since a frozen index was built; above this, it is built again
TRAINING_ROWS = 64  # per list, for k-means
SAMPLE = 32  # queries per recall check

log = logging.getLogger(__name__)


class IVFSearch:
    """Inverted lists over the rows of the bank, rebuilt when they become uneven or old.

    Every `check_every` searches, the neighbours of a few queries are compared with the exact ones. Below `min_recall`, all
    later searches are exact. The index is where the bank is: in main memory it is updated per row. No index on a GPU can do
    that. There it is frozen: rows that were written after it was built are searched exactly, beside it.
    """

    def __init__(
        self, probes: int = 64, min_recall: float = 0.95, check_every: int = 50, frozen: bool | None = None
    ) -> None:
        """`frozen` None: if the bank is on a GPU and Faiss has GPU indices."""
        self.name = "faiss-ivf"
        self.probes, self.min_recall, self.check_every, self.frozen = probes, min_recall, check_every, frozen
        self.index: Any = None
        self.fresh = torch.empty(0, dtype=torch.bool)  # [n] written since the frozen index was built
        self.searches = 0
        self.recall = math.nan

    def search(self, q: Tensor, z: Tensor, k: int) -> Candidates:
        """q [Q, D], z [n, D] -> k rows per query with canonical scores. Rows outside the probed lists are missed."""
        if self.name == "torch" or len(z) <= k:
            return exact_search(q, z, k, torch_candidates)
        if self.index is None or (self.searches % self.check_every == 0 and self._is_old()):
            self._build(z)
        found = self._lookup(q, z, k)
        if self.searches % self.check_every == 0:
            self._check(q[:: max(1, len(q) // SAMPLE)], z, k)
        self.searches += 1
        return found

    def changed(self, z: Tensor, rows: Tensor) -> None:
        """Rows of z that were written. `rows` may have repetitions and indices outside z."""
        if self.index is None:
            return
        if self.frozen:  # without reading anything on the host; row n is outside
            self.fresh.index_fill_(0, rows.clamp(0, len(z)), True)
            return
        rows = torch.unique(rows)
        rows = rows[(rows >= 0) & (rows < len(z))]
        faiss_threads()
        self.index.update_vectors(rows.cpu().numpy(), z[rows].cpu().numpy())

    def imbalance(self) -> float:
        """Longest list / mean list."""
        sizes: list[int] = [self.index.invlists.list_size(i) for i in range(self.index.nlist)]
        return max(sizes) * len(sizes) / sum(sizes)

    def _is_old(self) -> bool:
        if self.frozen:
            return self.fresh.double().mean().item() > STALE
        return self.imbalance() > IMBALANCE

    def _build(self, z: Tensor) -> None:
        faiss = faiss_threads()
        if self.frozen is None:
            self.frozen = z.device.type == "cuda" and has_gpu()
        load_faiss_for_tensors()
        lists = max(1, min(int(4 * math.sqrt(len(z))), len(z) // 39))  # k-means wants 39 points per centroid
        rows = (z if self.frozen else z.cpu()).contiguous()
        self.index = None  # frees its memory first
        if rows.device.type == "cuda":
            index = gpu_lists(rows.device, z.shape[1], lists)
        else:
            index = faiss.IndexIVFFlat(faiss.IndexFlatIP(z.shape[1]), z.shape[1], lists, faiss.METRIC_INNER_PRODUCT)
        index.train(rows[:: max(1, len(rows) // (TRAINING_ROWS * lists))].contiguous())
        index.add(rows)
        if not self.frozen:
            index.set_direct_map_type(faiss.DirectMap.Array)
        index.nprobe = min(self.probes, lists)
        self.index = index
        self.fresh = torch.zeros(len(z) + 1, dtype=torch.bool, device=z.device)
        log.info("faiss-ivf: built %d lists of %d rows on %s", lists, len(z), rows.device.type)

    def _lookup(self, q: Tensor, z: Tensor, k: int) -> Candidates:
        faiss_threads()
        here = q if self.frozen else q.cpu()
        rows = self.index.search(here.contiguous(), k)[1].to(q.device)
        if self.frozen:
            fresh = self.fresh[:-1].nonzero().squeeze(1)
            rows = rows.masked_fill(
                self.fresh[rows], -1
            )  # where the index has them is where they were (row -1 is row n)
            if len(fresh):
                near = exact_search(q, z[fresh], min(k, len(fresh)), torch_candidates).rows
                rows = torch.cat([rows, fresh[near]], 1)
        missing = rows < 0
        scores = canonical_scores(q, z, rows.clamp(min=0)).masked_fill(missing, -torch.inf)
        rows = rows.masked_fill(missing, len(z))
        order = best_order(scores, rows, k)
        return Candidates(scores.gather(1, order), rows.gather(1, order))

    def _check(self, q: Tensor, z: Tensor, k: int) -> None:
        kth = exact_search(q, z, k, torch_candidates).scores[:, -1:]
        # Compare scores, not rows: tied rows are equally good. 1e-6, because the index computes in fp32.
        self.recall = (self._lookup(q, z, k).scores >= kth - 1e-6).double().mean().item()
        if self.recall < self.min_recall:
            probed = f"{self.index.nprobe} of {self.index.nlist} lists"
            message = "faiss-ivf: recall %.3f with %s probed is below %.3f; the search is exact (torch) from now on"
            log.warning(message, self.recall, probed, self.min_recall)
            self.name, self.index = "torch", None
