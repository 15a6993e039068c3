"""Mutated files of every format: read, or refused in a sentence; never a traceback, 10 seconds or 1 GiB.

`pytest tests/fuzz` tries a few of each; `make fuzz` (FUZZ=4000) some 100,000."""
