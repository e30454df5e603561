"""How the collectives of a worker are broken off when the agent says so."""
