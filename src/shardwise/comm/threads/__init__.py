"""What ranks that are threads of one process do when they meet: jobs, streams, whose turn it is."""
