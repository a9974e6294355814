"""`python -m mycel` is `mycel`."""

from mycel.cli import main

main()
