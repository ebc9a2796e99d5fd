"""What a device is and does: arithmetic of its matrix units and instructions, as exact models on torch tensors.

Imports neither vime nor rlkernel. ``matrix`` holds what the models share; ``cuda`` is sm_90 (H100, H200), ``rocm`` is
gfx942 (MI300X). A model says in its docstring what it was compared with, and on which device, or that it is predicted.
"""
