"""Megatron-Core: goes on from the failed step with DP x TP x PP. The only package that imports megatron."""

from unicron_elastic.megatron.groups import begin_alone, takes_place

if takes_place():  # before the script makes its process groups
    begin_alone()

from unicron_elastic.megatron.attach import attach
from unicron_elastic.megatron.checkpoint import load
from unicron_elastic.megatron.workload import configuration

__all__ = ["attach", "configuration", "load"]
