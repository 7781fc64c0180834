"""Resharding of checkpoints on disk, without starting ranks."""
