"""What other libraries have wrapped, as a Run takes it."""
