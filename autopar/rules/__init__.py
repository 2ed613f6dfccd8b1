"""What is known about each primitive: one factor rule."""
