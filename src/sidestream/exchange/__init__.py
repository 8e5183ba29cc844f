"""The wire: two operators that start and wait for a transfer, their autograd pair, the link, and spans.

Every row that leaves a rank passes through `ops.py`. Collectives, throttling, spans and fault injection hook there.
"""
