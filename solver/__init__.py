"""From a graph and a cluster to a plan."""
