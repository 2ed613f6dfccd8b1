"""Datasheet figures of known hardware, as JSON."""
