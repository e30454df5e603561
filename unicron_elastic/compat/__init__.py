"""All that is known of torch's private and changing parts; who needs one of them asks here.

What differs between versions of torch is found out by asking the installed one, its names and signatures, never by its
version number. Importing this package imports nothing; its modules say of themselves whether they import torch.
"""

__all__ = ["KNOWN"]

KNOWN = ("2.11", "2.15")  # the oldest and the newest torch with which all of it was tried
