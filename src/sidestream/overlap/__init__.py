"""Schedules: the order of work in a unit, written in stages with a start and a finish."""
