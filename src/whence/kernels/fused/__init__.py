"""The fused backend: Triton kernels in `device`, and the host code that launches them."""
