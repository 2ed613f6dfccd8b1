"""Ways to move arrays between workers, behind one contract."""
