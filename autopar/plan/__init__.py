"""The frozen plan and its file format."""
