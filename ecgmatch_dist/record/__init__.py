"""The run folder: one module for each kind of file that a run writes."""
