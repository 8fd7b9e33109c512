"""The error that commands report in one line."""


class CommandError(Exception):
    """Something that the user can put right; the message is one line that says how."""
