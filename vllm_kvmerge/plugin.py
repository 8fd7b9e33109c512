"""Entry points that vLLM finds in every server of an environment where the package is installed."""


def register() -> None:
    """Entry point ``kvmerge`` of ``vllm.general_plugins``: does nothing, on purpose.

    vLLM calls it in every process of every server, also of those that compress nothing. Compression hangs on the worker
    and scheduler classes alone (see ``kvmerge_engine_args``): importing them registers the attention backend, the cache
    spec and its manager, so a server that was not given them stays stock. The entry point exists because vLLM's list of
    allowed plugins, ``VLLM_PLUGINS``, works by name, and the endpoint plugin has this one.
    """
