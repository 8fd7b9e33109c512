"""Models that commands know by name: the small one that ships with the package, how it was trained, and real ones."""

from pathlib import Path


def model_path() -> str:
    """Folder of the demo model: weights, configuration, tokenizer and chat template."""
    return str(Path(__file__).parent / "model")


def named(model: str) -> str:
    """The folder of the model that a command calls ``demo``, or by a name of ``pretrained.SOURCES``; any other name
    stays as it is. Raises CommandError if the model cannot be had."""
    from vllm_kvmerge.demo import pretrained

    if model == "demo":
        return model_path()
    return pretrained.folder(model) if model in pretrained.SOURCES else model


def head_budgets_path(model: str) -> str | None:
    """The file of head budgets of a model that commands know by name, whose folder is ``model``, if there is one."""
    from vllm_kvmerge.demo import pretrained

    folders = {model_path(): "demo", **{str(pretrained.cached(name)): name for name in pretrained.SOURCES}}
    path = Path(__file__).parent / "head_budgets" / f"{folders.get(model)}.json"
    return str(path) if path.exists() else None


def kvzap_path() -> str:
    """Folder of the demo model's KVzap model."""
    return str(Path(__file__).parent / "kvzap")
