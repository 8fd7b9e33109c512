"""A plugin that cannot be imported."""

raise RuntimeError("over two\nlines")
