"""A row of numbers per unlabelled ECG, the same on all ranks."""

import torch
from torch import Tensor

from ecgmatch_dist.distributed.collectives import gather_rows


class RowState:
    """`values` [N_U, C]. Every rank holds all rows, and writes the rows of all ranks in each step."""

    def __init__(self, rows: int, classes: int, fill: float, dtype: torch.dtype, device: torch.device) -> None:
        # Padding is written to one extra row: to skip it, the host would have to read a mask.
        self._rows = torch.full((rows + 1, classes), fill, dtype=dtype, device=device)

    @property
    def values(self) -> Tensor:
        return self._rows[:-1]

    def write(self, ids: Tensor, values: Tensor, where: Tensor | None = None) -> None:
        """Set rows `ids` [U] (-1: padding) to `values` [U, C] where `where` [U, C] is true; of equal ids the last counts."""
        ids, values = gather_rows(ids), gather_rows(values.to(self._rows.dtype))
        # A batch across two epochs may hold a row twice. Both copies write the value of the last one, so that the result does
        # not depend on the order in which a device writes them.
        order = ids.sort(stable=True)
        last = order.indices[torch.searchsorted(order.values, ids, right=True) - 1]
        ids, values = torch.where(ids < 0, len(self._rows) - 1, ids), values[last]
        if where is not None:
            values = torch.where(gather_rows(where)[last], values, self._rows[ids])
        self._rows.index_copy_(0, ids, values)
