"""Entry points that vLLM finds in every server of an environment where the package is installed."""


def register() -> None:
    """Entry point ``kvmerge`` of ``vllm.general_plugins``: does nothing, on purpose.

    vLLM calls it in every process of every server, including servers that compress nothing. Compression depends on the
    worker and scheduler classes alone (see ``kvmerge_engine_args``): a server without them stays stock. The entry point
    exists because ``VLLM_PLUGINS`` allows plugins by name, and the endpoint plugin has this name.
    """
