"""`python -m diffsieve` is the same as `diffsieve`."""

from .cli import main

if __name__ == "__main__":
    main()
