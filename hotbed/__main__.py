"""`python -m hotbed` is the `hotbed` command."""

from hotbed.cli import main

main()
