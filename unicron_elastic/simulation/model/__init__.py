"""What is simulated: jobs and clusters, how long things take, what is achieved and lost. Values and simulated time."""
