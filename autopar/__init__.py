"""Automatic parallelisation for JAX."""
