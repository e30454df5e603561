"""The manifests: what is in them is known to Kubernetes, JobSet, Kubeflow's Trainer and unicron-run.

Schemas are not part of this repository. Those of Kubernetes itself come with the package ``kubernetes-validate``, those
of JobSet and Trainer with ``kubeflow-trainer-api``; UNICRON_TEST_CRDS names a folder with the two projects' files
``*_jobsets.yaml``, ``*_trainingruntimes.yaml`` and ``*_trainjobs.yaml``. What is not there is skipped.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from unicron_elastic.compat.command_line import torchrun_parser
from unicron_elastic.launcher.config.arguments import get_args_parser
from unicron_elastic.launcher.config.options import OPTIONS

FOLDER = Path(__file__).parents[2] / "contrib" / "kubernetes"
FILES = ("etcd", "jobset", "statefulset", "trainjob")
DOCUMENTS: list[dict[str, Any]] = [
    document for name in FILES for document in yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
]
CUSTOM = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}
ENVIRONMENT = {"UNICRON_NODE_NAME", "UNICRON_ETCD_ENDPOINT"} | {option.variable for option in OPTIONS}
OF_TRAINER = {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "3",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29400",
}


def _name(document: dict[str, Any]) -> str:
    return f"{document['kind']}-{document['metadata']['name']}"


def _of(*kinds: str) -> list[dict[str, Any]]:
    return [document for document in DOCUMENTS if document["kind"] in kinds]


def _pod_specs(found: Any) -> list[dict[str, Any]]:
    if isinstance(found, list):
        return [spec for each in found for spec in _pod_specs(each)]
    if not isinstance(found, dict):
        return []
    inner = [spec for each in found.values() for spec in _pod_specs(each)]
    return [found, *inner] if "containers" in found else inner


CONTAINERS = [
    pytest.param(container, id=f"{_name(document)}-{container['name']}")
    for document in DOCUMENTS
    for spec in _pod_specs(document)
    for container in spec["containers"]
]


def test_the_manifests_are_those_of_the_documentation() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(FILES)
    assert [document["kind"] for document in DOCUMENTS] == [
        "Service", "Deployment", "JobSet", "Service", "StatefulSet", "TrainingRuntime", "TrainJob",
    ]  # fmt: skip


@pytest.mark.parametrize("document", _of("Service", "Deployment", "StatefulSet"), ids=_name)
def test_kubernetes_takes_them(document: dict[str, Any]) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate, which has the schemas")
    newest = validator.latest_version()
    validator.validate(document, newest, strict=True)
    with pytest.raises(validator.ValidationError):
        validator.validate({**document, "spec": {**document["spec"], "replica": 1}}, newest, strict=True)


@pytest.mark.parametrize("document", _of(*CUSTOM), ids=_name)
def test_the_models_of_trainer_take_them_whole(document: dict[str, Any]) -> None:
    pytest.importorskip("kubeflow_trainer_api", reason="needs kubeflow-trainer-api, which has the models")
    models: Any = importlib.import_module("kubeflow_trainer_api.models")
    model = getattr(models, CUSTOM[document["kind"]])
    assert model.from_dict(document).to_dict() == document  # what a model does not know it leaves out
    odd = {**document, "spec": {**document["spec"], "nonsense": 1}}
    assert model.from_dict(odd).to_dict() != odd


@pytest.mark.parametrize("document", _of(*CUSTOM), ids=_name)
def test_the_schema_of_its_kind_takes_them(document: dict[str, Any]) -> None:
    folder = os.environ.get("UNICRON_TEST_CRDS")
    if not folder:
        pytest.skip("needs UNICRON_TEST_CRDS, a folder with the CustomResourceDefinitions of JobSet and Trainer")
    jsonschema = pytest.importorskip("jsonschema")
    (path,) = Path(folder).glob(f"*_{document['kind'].lower()}s.yaml")
    version = document["apiVersion"].partition("/")[2]
    (found,) = [
        each["schema"]["openAPIV3Schema"]
        for each in yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]["versions"]
        if each["name"] == version
    ]
    schema = _closed(found)
    schema["properties"]["metadata"] = {"type": "object"}
    errors = [f"{list(each.path)}: {each.message}" for each in jsonschema.Draft7Validator(schema).iter_errors(document)]
    assert errors == []


def _closed(schema: Any) -> Any:
    """The same schema, but nothing is allowed of which it does not speak; whole numbers or texts as Kubernetes does."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    closed = {name: _closed(each) for name, each in schema.items()}
    if closed.get("type") == "object" and "properties" in closed:
        closed.setdefault("additionalProperties", bool(closed.get("x-kubernetes-preserve-unknown-fields")))
    return closed


@pytest.mark.parametrize("container", CONTAINERS)
def test_variables_are_known_to_somebody(container: dict[str, Any]) -> None:
    named = [each["name"] for each in container.get("env", [])]
    assert len(set(named)) == len(named)
    torchrun = {f"PET_{action.dest.upper()}" for action in torchrun_parser()._actions}
    assert not set(named) & set(OF_TRAINER)  # Trainer refuses a job that sets one of them
    assert {name for name in named if name.startswith("PET_")} <= torchrun
    assert {name for name in named if name.startswith("UNICRON_")} <= ENVIRONMENT
    words = [*container.get("command", []), *container.get("args", [])]
    used = re.findall(r"\$\((\w+)\)", " ".join(words))
    assert set(used) <= set(named)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_pod_that_is_to_end_leaves_first_and_has_the_time(container: dict[str, Any]) -> None:
    if "lifecycle" not in container:
        assert container["name"] == "etcd"
        return
    (script,) = container["lifecycle"]["preStop"]["exec"]["command"][2:]
    drain, _, wait = script.partition("; ")
    assert drain.startswith('unicron drain "$UNICRON_NODE_NAME" --absent --for 90s --reason ')
    (spec,) = [spec for document in DOCUMENTS for spec in _pod_specs(document) if container in spec["containers"]]
    assert int(wait.removeprefix("sleep ")) + 30 <= spec["terminationGracePeriodSeconds"]


def test_unicron_run_takes_the_command_line_of_the_jobset() -> None:
    (container,) = [c for document in _of("JobSet") for spec in _pod_specs(document) for c in spec["containers"]]
    assert container["command"] == ["unicron-run"]
    given = get_args_parser().parse_args(container["args"])
    assert (given.nnodes, given.rdzv_backend, given.training_script) == ("2:4", "unicron", "train.py")
    assert given.training_script_args == ["--epochs=3"]


def test_unicron_run_takes_what_trainer_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    (runtime,), (job,) = _of("TrainingRuntime"), _of("TrainJob")
    assert job["spec"]["runtimeRef"] == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    (spec,) = _pod_specs(runtime)
    fixed = {each["name"]: each["value"] for each in spec["containers"][0]["env"] if "value" in each}
    for name, value in (fixed | OF_TRAINER).items():
        monkeypatch.setenv(name, value)
    trainer = job["spec"]["trainer"]
    assert trainer["command"] == ["unicron-run"]
    given = get_args_parser().parse_args(trainer["args"])
    assert (given.nnodes, given.nproc_per_node, given.rdzv_backend) == ("2:4", "8", "unicron")
    assert (given.rdzv_endpoint, given.max_restarts) == ("train-etcd:2379", 100)
    plain = get_args_parser().parse_args(["train.py"])
    assert (plain.nnodes, plain.node_rank, plain.master_addr) == ("4", 3, "train-node-0-0.train")


def test_all_that_meet_name_the_same_etcd() -> None:
    service = next(document for document in DOCUMENTS if _name(document) == "Service-train-etcd")
    endpoint = f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    for name in ("jobset", "statefulset", "trainjob"):
        assert set(re.findall(r"[\w-]+:2379", (FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))) == {endpoint}
