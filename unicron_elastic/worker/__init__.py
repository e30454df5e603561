"""What runs in, or talks to, the training process. Standard library only: torch is used when the script imported it."""
