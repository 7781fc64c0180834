"""Where checkpoints are kept: local folders, or object stores through fsspec."""
