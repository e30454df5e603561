"""How one job recovers: events in, commands out, as pure code. The live agent and the simulator both drive it."""
