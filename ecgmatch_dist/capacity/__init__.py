"""Estimates of what a training step costs on a cluster."""
