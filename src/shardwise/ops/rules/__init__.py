"""The built-in sharding rules, one file for each family of operators."""
