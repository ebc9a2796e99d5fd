"""Vendor libraries where they were seen to give the contract's bits: recorded per shape, never assumed."""
