"""A table with a row for every unlabelled ECG, the same on all ranks."""

import torch
from torch import Tensor

from ecgmatch_dist.distributed import gather_rows


class Table:
    """`values` [N_U, C], replicated: each step's rows are gathered from all ranks and written by every rank."""

    def __init__(self, rows: int, classes: int, fill: float, dtype: torch.dtype, device: torch.device) -> None:
        # One row more, where padding is written, so that no mask has to be read.
        self._rows = torch.full((rows + 1, classes), fill, dtype=dtype, device=device)

    @property
    def values(self) -> Tensor:
        return self._rows[:-1]

    def write(self, ids: Tensor, values: Tensor, where: Tensor | None = None) -> None:
        """Set `values` [U, C] at rows `ids` [U] (-1: padding), where `where` [U, C] holds; of equal ids the last counts."""
        ids, values = gather_rows(ids), gather_rows(values.to(self._rows.dtype))
        # A batch that straddles two epochs may hold a row twice. Every copy writes what the last one says, so that the
        # order in which a device writes them does not matter.
        order = ids.sort(stable=True)
        last = order.indices[torch.searchsorted(order.values, ids, right=True) - 1]
        ids, values = torch.where(ids < 0, len(self._rows) - 1, ids), values[last]
        if where is not None:
            values = torch.where(gather_rows(where)[last], values, self._rows[ids])
        self._rows.index_copy_(0, ids, values)
