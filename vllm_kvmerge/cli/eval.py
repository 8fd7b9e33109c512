"""``vllm-kvmerge eval``: hands over to the evaluation."""


def run(argv: list[str]) -> int:
    from vllm_kvmerge.evaluation.command import main

    return main(argv)
