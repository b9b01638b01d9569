"""`python -m tierd` runs the `tierd` command."""

from tierd.cli import main

if __name__ == "__main__":
    main()
