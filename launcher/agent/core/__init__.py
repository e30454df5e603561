"""The agent's event loop around the recovery state machine, and what it tells and hears."""
