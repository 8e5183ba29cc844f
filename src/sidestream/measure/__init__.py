"""Measuring one layer, or dispatchers alone, against others: shapes, inputs, rounds, peers, reports."""
