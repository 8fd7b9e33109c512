"""Tasks of evaluations; one module per benchmark."""

import pkgutil
from importlib import import_module

from vllm_kvmerge.evaluation.tasks.base import TASKS, Task


def load_tasks() -> dict[str, type[Task]]:
    """Every task of this package by name. Modules must be quick to import: data and models wait until they are used."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        import_module(module.name)
    return TASKS
