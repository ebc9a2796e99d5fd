"""Accumulation-order discovery: the summation tree of any callable reduction, by numerical probing."""
