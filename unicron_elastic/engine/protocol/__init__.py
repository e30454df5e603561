"""What a replica decides when it trains with others, whoever is lost: pure, without torch, time, input and output."""
