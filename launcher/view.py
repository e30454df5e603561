from typing import Any


class WorkerView:
    def __init__(self, **k: Any):
        pass


class JobView:
    def __init__(self, **k: Any):
        pass
