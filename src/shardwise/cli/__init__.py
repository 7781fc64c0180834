"""L5: the commands. Start-up never loads torch."""
