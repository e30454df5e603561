"""Which ranks train together: how they meet, agree, connect, and how newcomers get in."""
