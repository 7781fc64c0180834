"""Folders of torch.distributed.checkpoint, read and written without torch and without running a pickle."""
