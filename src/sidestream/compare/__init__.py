"""Runs side by side: reading them, refusing unfair pairs, statistics over seeds, and the outputs. No torch here."""
