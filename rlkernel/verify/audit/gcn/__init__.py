"""A machine that executes amdgcn listings of gfx942 on bits and symbols."""
