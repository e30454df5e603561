"""Probes of a host: memory, disks, links, clocks, processes, and a site's own command."""
