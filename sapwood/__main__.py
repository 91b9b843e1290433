"""`python -m sapwood` is the `sapwood` command."""

from sapwood.server.cli import main

if __name__ == "__main__":
    main()
