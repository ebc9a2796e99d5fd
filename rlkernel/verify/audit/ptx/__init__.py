"""A machine that executes PTX listings on bits and symbols."""
