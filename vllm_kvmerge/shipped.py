"""Files that come with the package."""

from pathlib import Path


def shipped(name: str) -> Path:
    """The file ``name``, or the one of that name that came with the package: ``configs/...``, outside a checkout."""
    path = Path(name)
    within = Path(__file__).parent / path
    return within if name.startswith("configs/") and not path.exists() and within.exists() else path
