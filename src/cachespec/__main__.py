"""``python -m cachespec``: the same as the console script."""

from cachespec.cli.main import main

if __name__ == "__main__":
    main()
