"""Lookups in sharded embedding tables."""
