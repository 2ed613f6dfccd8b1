"""Pipeline schedules, one a file, and what is worked out about them."""
