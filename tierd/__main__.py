"""`python -m tierd` is `tierd`."""

from tierd.cli import main

if __name__ == "__main__":
    main()
