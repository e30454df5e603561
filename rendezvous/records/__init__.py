"""What the store holds: keys and their texts, read with bounds."""
