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


def head_budgets_path(name: str) -> str | None:
    """The file of head budgets that ships for a model that commands know by ``name``, if there is one."""
    folder = Path(__file__).parent / "head_budgets"
    return next((str(path) for path in folder.iterdir() if path.stem == name), None)


def kvzap_path() -> str:
    """Folder of the demo model's KVzap model."""
    return str(Path(__file__).parent / "kvzap")
