"""Stages over submeshes: profiles and the search."""
