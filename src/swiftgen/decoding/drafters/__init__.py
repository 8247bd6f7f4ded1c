"""One drafter a file; `base` says what a drafter is."""
