"""The parts of ``benchmarks/differential.py``: plain torch beside ``unicron_elastic.Run``, case by case."""
