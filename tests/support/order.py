"""Records every collective and every new process group with the thread that issued it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "all_gather_single",
    "_allgather_base",
    "alltoall",
    "all_to_all_single",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "scatter",
    "reduce_scatter",
)


class Call(NamedTuple):
    """One collective, or the making of a group."""

    thread: int
    group: str
    operation: str


@contextmanager
def recorded(group_class: type = dist.ProcessGroup) -> Iterator[list[Call]]:
    """The calls of this process on groups of `group_class`. DDP's own all-reduces go past the methods of torch's class, but not
    past those of a class in Python, as that of ranks in threads."""
    calls: list[Call] = []

    def spy(name: str, original: Any) -> Any:
        def method(self: Any, *args: Any, **options: Any) -> Any:
            calls.append(Call(threading.get_ident(), self.group_desc or self.group_name, name))
            return original(self, *args, **options)

        return method

    originals = {name: vars(group_class)[name] for name in COLLECTIVES if name in vars(group_class)}
    assert len(originals) >= 6, f"{group_class} has other methods: {sorted(vars(group_class))}"
    helper = c10d._new_process_group_helper

    def new_group(*args: Any, **options: Any) -> Any:
        calls.append(Call(threading.get_ident(), str(options.get("group_desc") or ""), "new_group"))
        return helper(*args, **options)

    for name, original in originals.items():
        setattr(group_class, name, spy(name, original))
    c10d._new_process_group_helper = new_group  # type: ignore[assignment]
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(group_class, name, original)
        c10d._new_process_group_helper = helper
