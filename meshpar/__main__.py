"""`python -m meshpar` is `meshpar`."""

from meshpar.cli import main

main()
