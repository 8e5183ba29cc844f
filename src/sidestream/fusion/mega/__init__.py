"""`fusion=mega`: dispatch, experts and combine in one operation."""
