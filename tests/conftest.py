"""Settings of all tests."""

from hypothesis import settings

# how long an example takes says something about the machine, nothing about the code
settings.register_profile("vime", deadline=None)
settings.load_profile("vime")
