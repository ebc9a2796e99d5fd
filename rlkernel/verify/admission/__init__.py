"""Admission: no kernel is believed; each is compared, bit for bit, with the interpreter of its contract entries."""
