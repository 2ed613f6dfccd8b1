"""Clusters of ops and repeated layers."""
