"""The fused backend: Triton kernels with linear memory and gradients in a fixed order.

A call passes through these modules in order. backend.py decides whether the call can run here and
collects its tensors and settings. function.py is the autograd function, or the operator that a
compiler sees. launch.py writes a launch plan (plan.py) once for each signature; the plan reserves
memory and starts the kernels of device/.

On its way a call is written down in several forms, each made of the one before:

AttentionCall   call.py       the arguments of `attend`, checked
Given and Call  backend.py    its tensors as kernels read them, and all else that decides its plans
names and flat  function.py   the same for an operator: a list of tensors, the names of their fields
                              in Given, and Call as one flat tuple
slots           plan.py       layouts in place of the tensors: what a plan is written from
Task            backend.py    Given and Call of these slots, with a curve or product as one field
Arguments       launch.py     the groups of arguments that kernels take (device/arguments.py)

A second call with the same signature (SignedCall in backend.py) skips all of them.
"""
