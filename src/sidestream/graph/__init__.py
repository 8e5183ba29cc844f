"""How the attempt of a step is run, and what may not happen in it."""
