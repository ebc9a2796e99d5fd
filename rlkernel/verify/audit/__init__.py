"""Instruction audit: Triton kernels compiled for sm_90 and gfx942, their machine code held to the contract."""
