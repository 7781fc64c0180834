"""Checkpoints seen under other names and in other parts: filters, name maps, element types."""
