"""``python -m vllm_kvmerge.cli`` is the command ``vllm-kvmerge``."""

import sys

from vllm_kvmerge.cli import main

if __name__ == "__main__":
    sys.exit(main())
