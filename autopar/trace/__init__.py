"""From a Python function to an OpGraph."""
