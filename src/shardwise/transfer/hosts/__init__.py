"""Plans that send as few bytes as possible between hosts."""
