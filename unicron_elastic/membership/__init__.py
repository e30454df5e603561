"""Who belongs to a job's rounds, who coordinates and who is lost: decided purely from store and heartbeats."""
