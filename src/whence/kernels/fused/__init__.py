"""The fused backend: Triton kernels with linear memory and gradients in a fixed order.

A call goes one way: backend (can it run here?) -> inputs (its tensors and settings) -> function
(autograd, or the operator that compilers see) -> plan (memory and launches, made once for a
signature by launch) -> the kernels in device/.
"""
