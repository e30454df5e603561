"""What the console shows of a job while it runs."""
