"""The parts of going on from the failed step that are the same for every kind of replica."""
