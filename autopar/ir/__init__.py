"""The graph IR: meshes, shardings, ops, and their verifier."""
