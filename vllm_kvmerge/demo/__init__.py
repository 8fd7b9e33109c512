"""The small model that ships with the package, and how it was trained."""

from pathlib import Path


def model_path() -> str:
    """Folder of the demo model: weights, configuration, tokenizer and chat template."""
    return str(Path(__file__).parent / "model")


def kvzap_path() -> str:
    """Folder of the demo model's KVzap model."""
    return str(Path(__file__).parent / "kvzap")
