"""Builds a kustomization: with kustomize or kubectl where one is installed, and in Python with the features ours use.

Those are resources, components, a replaced ConfigMap, strategic merge patches by name, images and the namespace.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

Documents = list[dict[str, Any]]
FEATURES = frozenset(
    ("apiVersion", "kind", "resources", "components", "configMapGenerator", "patches", "images", "namespace")
)


def command() -> list[str] | None:
    """The program that is installed."""
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    return ["kubectl", "kustomize"] if shutil.which("kubectl") else None


def build_with_program(folder: Path) -> Documents:
    program = command()
    assert program is not None
    done = subprocess.run([*program, str(folder)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def build_in_python(folder: Path, so_far: Documents | None = None) -> Documents:
    """`so_far`: what a component changes."""
    tree = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    assert tree.keys() <= FEATURES, f"{folder}: not built here: {tree.keys() - FEATURES}"
    documents = so_far or []
    for name in tree.get("resources", []):
        path = folder / name
        documents += build_in_python(path) if path.is_dir() else yaml.safe_load_all(path.read_text(encoding="utf-8"))
    for name in tree.get("components", []):
        documents = build_in_python(folder / name, documents)
    for generator in tree.get("configMapGenerator", []):
        assert (generator["behavior"], generator["options"]) == ("replace", {"disableNameSuffixHash": True})
        former = _find(documents, "ConfigMap", generator["name"])
        former["data"] = {name: (folder / name).read_text(encoding="utf-8") for name in generator["files"]}
    for patch in tree.get("patches", []):
        change = yaml.safe_load(patch["patch"])
        patched = _find(documents, change["kind"], change["metadata"]["name"])
        merged = merge(patched, change)
        patched.clear()
        patched.update(merged)
    for image in tree.get("images", []):
        _set_image(documents, image["name"], f"{image['newName']}:{image['newTag']}")
    for document in documents if "namespace" in tree else []:
        document["metadata"]["namespace"] = tree["namespace"]
    return documents


def merge(value: Any, change: Any) -> Any:
    """A strategic merge: null removes a key, lists of things with names are merged by name, others are replaced."""
    if isinstance(value, dict) and isinstance(change, dict):
        kept = {key: old for key, old in value.items() if change.get(key, old) is not None}
        added = {key: merge(kept.get(key), new) for key, new in change.items() if new is not None}
        return {**kept, **added}
    if isinstance(change, list) and change and all(isinstance(item, dict) and "name" in item for item in change):
        by_name = {item["name"]: item for item in value or []}
        return list((by_name | {item["name"]: merge(by_name.get(item["name"]), item) for item in change}).values())
    return copy.deepcopy(change)


def in_order(value: Any) -> Any:
    """For comparisons: lists of things with names by name, because the order of a merge differs between programs."""
    if isinstance(value, dict):
        return {key: in_order(inner) for key, inner in value.items()}
    if isinstance(value, list):
        inner = [in_order(item) for item in value]
        named = all(isinstance(item, dict) and "name" in item for item in inner)
        return sorted(inner, key=lambda item: item["name"]) if named else inner
    return value


def _find(documents: Documents, kind: str, name: str) -> dict[str, Any]:
    (found,) = [each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


def _set_image(documents: Documents, name: str, image: str) -> None:
    for document in documents:
        pod = document.get("spec", {}).get("template", {}).get("spec", {})
        for container in [*pod.get("initContainers", []), *pod.get("containers", [])]:
            if container["image"].partition(":")[0] == name:
                container["image"] = image
