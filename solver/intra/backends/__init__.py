"""ILP back-ends, each named in one registry and loaded on use."""
