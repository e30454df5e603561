"""Probes of one node: its GPUs, its host, a site's own commands; `watch` runs them and tells of each change once.

No probe raises into its caller. What is missing (a GPU, a driver, a function of a library, a cgroup, a file under
/sys) is said once, and the check that needs it steps aside.
"""
