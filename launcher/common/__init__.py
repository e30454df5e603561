"""What every room of the launcher uses: the event loop, output, streams, tables, a small HTTP server."""
