"""What is served to others over HTTP."""
