"""Search strategies behind one protocol."""
