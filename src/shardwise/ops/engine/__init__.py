"""How an operator runs on ShardedTensors: registry, choice of a strategy, dispatcher, fast path."""
