import json


class Ledger:
    def __init__(self, path, say):
        self.path = path

    def record(self, i):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        open(self.path, "a").write(json.dumps(i.to_json()) + "\n")


def default_ledger(run_id, log_dir):
    from pathlib import Path

    return (log_dir or Path("/tmp/ledger")) / "incidents.jsonl"
