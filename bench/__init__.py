"""The benchmarks: every speed claim, beside the peer it is measured against, in one run."""
