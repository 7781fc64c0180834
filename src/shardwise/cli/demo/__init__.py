"""The command `shardwise demo`: the whole story on local ranks."""
