"""How far a worker is in its collectives, and how they are broken off when the agent says so."""
