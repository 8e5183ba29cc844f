"""Ranks: groups and meshes, gradient reduction, clipping, checks that all ranks agree."""
