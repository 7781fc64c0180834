"""Checkpoint formats, one module or package for each."""
