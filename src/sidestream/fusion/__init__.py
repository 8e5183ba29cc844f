"""How the local experts turn rows into rows: `loop` (one GEMM per expert, the reference) and `grouped`."""
