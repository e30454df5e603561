"""Many seeds and policies, and what they come to as numbers, tables and figures."""
