"""Device code of the fused backend: what Triton compiles, and the groups of arguments it takes."""
