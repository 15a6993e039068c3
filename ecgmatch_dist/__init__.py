"""Distributed semi-supervised learning on multi-label 12-lead ECGs."""

__version__ = "0.1.0"
