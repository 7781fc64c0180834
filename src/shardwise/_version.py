"""The version of the package, read by the build as well, and the versions of torch that it is tested with."""

__version__ = "0.1.0"

SUPPORTED_TORCH = "torch 2.11 to 2.15"
