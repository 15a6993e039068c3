"""Synthetic databases: a model heart, its abnormalities, and recordings of them in the Challenge's format."""
