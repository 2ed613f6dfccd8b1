"""Intra-op sharding: one problem, several exact solvers."""
