"""Where plans run."""
