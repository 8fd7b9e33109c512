"""``vllm-kvmerge eval``: hands over to the evaluations."""


def run(argv: list[str]) -> int:
    """Runs a configuration or, for the words ``attention`` and ``refresh``, measures the error of attention."""
    if argv[:1] == ["attention"]:
        from vllm_kvmerge.evaluation.attention import main as measure_attention

        measure_attention(argv[1:])
        return 0
    if argv[:1] == ["refresh"]:
        from vllm_kvmerge.evaluation.refresh import main as measure_refreshes

        measure_refreshes(argv[1:])
        return 0
    from vllm_kvmerge.evaluation.command import main as run_configuration

    return run_configuration(argv)
