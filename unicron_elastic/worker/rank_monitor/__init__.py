"""NVIDIA's client for heartbeats and sections, for scripts written for ``ft_launcher``; it feeds our own detection.

Names, states and errors are those of ``nvidia_resiliency_ext.fault_tolerance`` 0.7 (NVIDIA Resiliency Extension, "Fault
Tolerance" in its documentation and its package's ``__init__``). Nothing else of that package is here.
"""
