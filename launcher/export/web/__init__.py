"""The web page of a cluster: its server, who may see it, and the page itself, which needs nothing from the internet."""
