"""The web page: the server, what it tells, and the page itself, which needs nothing from the internet."""
