"""Probes: what the platform under autopar does, tried on the machine at hand."""
