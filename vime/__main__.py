"""``python -m vime``: the same as ``vime``."""

from vime.cli.main import main

main()
