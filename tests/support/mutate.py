"""Damage for files: bytes replaced, inserted, removed, repeated or cut off, as chance and as people who mean harm do it."""

import os
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FUZZ") or 20)
"""Mutations per format."""
TOKENS = (
    b"", b"0", b"-1", b"1e999", b"NaN", b"9" * 30, b"9" * 5000, b"1000000000000", b"null", b"true", b"[]", b"{}", b"{", b"}",
    b"[" * 3000, b'"', b"'", b",", b";", b"\n", b"\r", b"\t", b"\0", b"\x1b[31m", b"\xff", b"\xef\xbb\xbf", b"\xd8\x00", b"../",
    b"/", b"=", b"=1+1", b"$(touch x)", b"<script>", b"%00", b"\\u0000", b"\\ud800",
)  # fmt: skip
MEMORY, SECONDS = 2**30, 10.0

fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,  # of the wall clock; `refused_at_most` looks at the time that was computed
    derandomize="FUZZ" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)
"""A few examples, always the same, in the suite; others each time with FUZZ."""


@st.composite
def mutated(draw: st.DrawFn, content: bytes) -> bytes:
    """One to four edits of `content`. With FUZZ chance makes them from one number: hypothesis, which would make failing ones
    simpler, takes longer for an edit than most readers for a file."""
    if "FUZZ" not in os.environ:
        return edited(content, lambda low, high: draw(st.integers(low, high)))
    return edited(content, random.Random(draw(st.integers(0, 2**64))).randint)


def edited(content: bytes, number: Callable[[int, int], int]) -> bytes:
    """`number(low, high)` chooses, both included."""

    def one_of(options: Sequence[Any]) -> Any:
        return options[number(0, len(options) - 1)]

    out = bytearray(content)
    for _ in range(number(1, 4)):
        start = number(0, len(out))
        stop = start + one_of((0, 1, 1, 2, 4, 8, 64))
        edit = one_of(("token", "token", "token", "bytes", "remove", "repeat", "cut"))
        if edit == "token":
            out[start:stop] = one_of(TOKENS)
        elif edit == "bytes":
            out[start:stop] = bytes(number(0, 255) for _ in range(number(0, 8)))
        elif edit == "remove":
            del out[start:stop]
        elif edit == "repeat":
            out[start:start] = out[start:stop] * one_of((1, 3, 100))
        else:
            del out[start:]
    return bytes(out)


@contextmanager
def refused_at_most(*errors: type[Exception]) -> Iterator[None]:
    """What reads a mutated file may raise one of `errors`, nothing else, and compute for ten seconds."""
    began = time.process_time()
    with suppress(*errors):
        yield
    assert time.process_time() - began < SECONDS


@contextmanager
def bounded_memory() -> Iterator[None]:
    """At most 1 GiB more than now; beyond it, allocations fail."""
    lines = Path("/proc/self/status").read_text().splitlines()
    now = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + MEMORY, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
