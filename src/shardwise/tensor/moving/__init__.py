"""Transfers on local tensors: how a move runs on this rank, and its dual for gradients."""
