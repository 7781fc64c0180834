"""Calls that were made before: what is noted of a first call, and how the next ones run without asking a rule."""
