"""Gets the state of a replica from the nearest peers that hold it."""
