"""What happens to a simulated cluster, and when: generated, from presets, or replayed from traces and ledgers."""
