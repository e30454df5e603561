"""What the coordinator and the nodes do about the plan: proposals, seats, orders. Pure."""
