"""``python -m mxjax`` is the command ``mxjax``."""

from mxjax.cli.entry import main

if __name__ == "__main__":
    main()
