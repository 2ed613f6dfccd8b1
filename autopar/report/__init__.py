"""What a plan says to people: summaries, audits, pictures."""
