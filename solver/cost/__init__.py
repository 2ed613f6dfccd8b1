"""What things cost: seconds and bytes."""
