"""Measuring one layer against others: shapes, inputs, rounds, peers, reports. Used by `scripts/bench_layer.py`."""
