"""Contract doubles of the expert-parallel libraries: same calls, CPU tensors, a gloo group, and every trap kept.

A double is passed where a dispatcher takes the library's module. Each was written from the API reference of the
libraries alone (sections 1 NCCL EP, 2 DeepEP v2, 3 HybridEP) before the adapter it tests; comments cite the section.
"""
