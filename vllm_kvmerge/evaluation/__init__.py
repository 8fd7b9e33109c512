"""Measurements of what compression costs in quality: scores on tasks, next-token loss, error of attention."""
