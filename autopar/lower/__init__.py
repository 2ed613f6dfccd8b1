"""From (plan, jaxpr) to programs."""
