"""What a script is told that asks of a run what no run can do: it does so again in each attempt."""


class WrongUseError(RuntimeError):
    """`WrongUseError`: the script uses a run in a way that cannot be right, and the message says which is."""

    __module__ = "unicron_elastic"  # where scripts find it, and by which people are told of it
