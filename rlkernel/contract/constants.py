"""Constants of the scalar primitives: exact float32 values, written as Python floats. Imports nothing.

The coefficients are minimax fits (relative error, Remez exchange at 40 digits), rounded to float32: they are the
definition of ``exp2.full``, ``exp2.p3`` and ``log2.full``. Every implementation takes them from here.
"""

from __future__ import annotations

LOG2E = 1.4426950216293335
LN2 = 0.6931471824645996

MAX_LANES = 256
"""The largest number of lanes of ``lane_sum``."""

ROUND_TO_INTEGER = 12582912.0
"""1.5 * 2^23: adding it rounds |x| < 2^22 to an integer, ties to even."""

ROUND_TO_INTEGER_BITS = 0x4B400000

EXP2_FULL = (
    1.0,
    0.6931471824645996,
    0.24022647738456726,
    0.055503323674201965,
    0.00961843691766262,
    0.0013398873852565885,
    0.00015353361959569156,
)
"""Coefficients of r^0 ... r^6, evaluated from the highest down by fma."""

EXP2_P3 = (1.0, 0.6932829022407532, 0.24221095442771912, 0.05500893294811249)
"""Coefficients of r^0 ... r^3, evaluated from the highest down by fma."""

LOG2_LOW = 1.925963033500011e-08
"""What LOG2E lacks of log2(e)."""

LOG2_FULL = (
    -0.7213475108146667,
    0.48089802265167236,
    -0.3606741428375244,
    0.2885710299015045,
    -0.24046392738819122,
    0.20511777698993683,
    -0.17900007963180542,
    0.17169447243213654,
    -0.16844962537288666,
    0.0970219224691391,
)
"""Coefficients of f^0 ... f^9 of the polynomial q in log2(1 + f) = f * LOG2E + f * (f * q + LOG2_LOW)."""

SQRT_HALF_BITS = 0x3F3504F3
SMALLEST_NORMAL = 1.1754943508222875e-38
TWO_TO_24 = 16777216.0
