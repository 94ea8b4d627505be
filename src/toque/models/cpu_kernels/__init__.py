"""Kernels in C for what surrounds the matrix products of bfloat16 training on a CPU."""
