"""Training and judging draft heads."""
