"""RULER's thirteen tasks (arXiv 2404.06654): prompts of any length, made up on the spot, and how they are scored.

Templates, parameters, sampling, scoring and the way prompts are brought to a length are those of
github.com/NVIDIA/RULER (its `synthetic.yaml` names the tasks). What differs is in
docs/evaluation.md.
"""

from vllm_kvmerge.evaluation.tasks.ruler import common_words, frequent_words, niah, qa, variable_tracking

__all__ = ["common_words", "frequent_words", "niah", "qa", "variable_tracking"]
