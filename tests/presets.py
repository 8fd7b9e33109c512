"""Presets as tests run them."""

from typing import Any

SMALL: dict[str, dict[str, Any]] = {"kvzap": {"window_size": 32}}
"""Fields without which a preset refuses budgets of 64 entries, by preset."""
