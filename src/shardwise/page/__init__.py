"""L5: the page of `shardwise view`. Facts are plain data, made here; the files in `front` draw them in a browser."""
