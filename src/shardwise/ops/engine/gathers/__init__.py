"""Parameters that are gathered for their use: ahead of it, in a known order, and again in the backward pass."""
