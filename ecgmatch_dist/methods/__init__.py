"""One file per method: its settings and its losses. base.py says how to write one."""
