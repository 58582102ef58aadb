"""``python -m minivllm`` is the command line."""

import sys

from minivllm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
