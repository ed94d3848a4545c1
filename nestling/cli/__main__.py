"""`python -m nestling.cli`."""

from nestling.cli.main import main

main()
