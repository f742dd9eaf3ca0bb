"""The fused backend's Triton code."""
