"""The fused backend: Triton kernels with linear memory and gradients in a fixed order.

A call passes through these modules in order. backend.py decides whether the call can run here and
collects its tensors and settings. function.py is the autograd function, or the operator that a
compiler sees. launch.py writes a launch plan (plan.py) once for each signature; the plan reserves
memory and starts the kernels of device/.
"""
