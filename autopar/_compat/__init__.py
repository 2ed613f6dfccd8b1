"""Differences between JAX versions, one file each, with the version at which it can go."""
