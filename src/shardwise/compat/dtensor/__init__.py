"""torch's DTensor: its layouts and ours, its operators' rules from ours, and tensors of one kind as the other."""
