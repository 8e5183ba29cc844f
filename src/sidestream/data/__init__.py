"""Corpora, token files, the step sampler and count-model baselines."""
