"""Surviving a kill: checkpoints, fencing of older copies (`generations`), heartbeats of the ranks, and stop signals."""
