"""Finding and checking rules by trying them."""
