"""Benchmarks: one question a file, `python -m benchmarks.NAME`; answers are ratios and counts."""
