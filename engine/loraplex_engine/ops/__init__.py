"""Numerical kernels of the engine: stateless functions over tensors, each with a slow twin that is its definition.

Every op is row-independent: what a row gets depends on that row alone, never on who shares the step. `dispatch` says
which form (naive, torch, native) serves which device and dtype; models and the runner import the op modules only.
"""
