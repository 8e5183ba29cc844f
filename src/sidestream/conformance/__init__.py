"""Does a part keep its protocol? What the first step of a run looks at, and what `scripts/check_part.py` tries."""
