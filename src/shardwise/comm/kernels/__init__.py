"""Copies and sums of many pieces of device memory in one launch, by kernels of Triton where that is installed."""
