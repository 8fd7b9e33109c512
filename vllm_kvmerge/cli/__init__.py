"""The command ``vllm-kvmerge``."""

from vllm_kvmerge.cli.serve import main

__all__ = ["main"]
