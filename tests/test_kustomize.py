"""deploy/kustomize: what is built validates, and agrees with the daemon and with the alerts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from tests.support import prometheus_rule
from tests.support.daemon import serving
from tests.support.kustomize import build_in_python, build_with_program, command, in_order
from tierd.config import file as config_file
from tierd.config import sections as config

ROOT = Path(__file__).parents[1]
KUSTOMIZE = ROOT / "deploy" / "kustomize"
KUBERNETES = "1.33"
CUSTOM = ("PodMonitor", "PrometheusRule")  # of the Prometheus Operator: no schema of Kubernetes has them

BUILT = ("base", "example", "two-users")

needs_program = pytest.mark.skipif(command() is None, reason="neither kustomize nor kubectl is installed")


def built(name: str) -> dict[str, dict[str, Any]]:
    documents = build_in_python(KUSTOMIZE / name)
    by_kind = {document["kind"]: document for document in documents}
    assert len(by_kind) == len(documents)
    return by_kind


def pod(documents: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return documents["Job"]["spec"]["template"]["spec"]


def names_in_env(container: dict[str, Any]) -> set[str]:
    return {variable["name"] for variable in container["env"]}


def changes(former: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]], kind: str) -> set[str]:
    """The keys of the only container of that kind that differ."""
    ((of_former,), (of_new,)) = (pod(documents)[kind] for documents in (former, new))
    return {key for key in of_former.keys() | of_new.keys() if of_former.get(key) != of_new.get(key)}


def configurations(tmp_path: Path, *several: dict[str, dict[str, Any]]) -> list[config.Config]:
    """What the daemon reads in each pod."""
    found: list[config.Config] = []
    for documents in several:
        (tmp_path / "tierd.toml").write_text(documents["ConfigMap"]["data"]["tierd.toml"])
        found.append(config_file.load(environ={}, cwd=tmp_path))
    return found


@needs_program
@pytest.mark.parametrize("name", BUILT)
def test_program_builds_what_these_tests_check(name: str) -> None:
    expected = {document["kind"]: document for document in build_with_program(KUSTOMIZE / name)}
    assert in_order(built(name)) == in_order(expected)


@pytest.mark.parametrize("name", BUILT)
def test_every_object_fits_the_schema(name: str) -> None:
    documents = built(name)
    assert {"ConfigMap", "PersistentVolumeClaim", "Job"} <= documents.keys()
    for kind, document in documents.items():
        if kind not in CUSTOM:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_base_is_the_file_that_can_be_applied_without_kustomize() -> None:
    text = (KUSTOMIZE / "base" / "kubernetes.yaml").read_text(encoding="utf-8")
    assert list(built("base").values()) == list(yaml.safe_load_all(text))


def test_everything_of_the_example_is_in_one_namespace() -> None:
    assert {document["metadata"]["namespace"] for document in built("example").values()} == {"training"}


def test_example_changes_only_what_differs_between_installations() -> None:
    """Probes, volumes, users and restart rules are those of the base."""
    base, example = built("base"), built("example")
    assert {key for key in pod(base) if pod(base)[key] != pod(example).get(key)} == {
        *("initContainers", "containers", "serviceAccountName")
    }
    assert base["Job"]["spec"]["podFailurePolicy"] == example["Job"]["spec"]["podFailurePolicy"]
    assert changes(base, example, "initContainers") == {"image", "env"}
    assert changes(base, example, "containers") == {"image", "command", "resources"}


def test_two_users_change_only_who_runs_and_what_each_is_told(tmp_path: Path) -> None:
    base, two_users = built("base"), built("two-users")
    assert {key for key in pod(base) if pod(base)[key] != pod(two_users).get(key)} == {
        *("initContainers", "containers", "serviceAccountName", "securityContext")
    }
    for kind in ("initContainers", "containers"):
        assert changes(base, two_users, kind) == {"env", "securityContext"}
    for kind in ("Job", "PersistentVolumeClaim"):
        base[kind]["spec"].pop("template", None)
        two_users[kind]["spec"].pop("template", None)
        assert two_users[kind] == base[kind]
    found = configurations(tmp_path, base, two_users)
    assert found[1] == msgspec.structs.replace(found[0], security=found[1].security)


def test_configuration_of_the_example_loads_and_fits_its_containers(tmp_path: Path) -> None:
    base, example = configurations(tmp_path, built("base"), built("example"))
    assert example.daemon == base.daemon
    assert example.hot == base.hot
    assert example.cold[0].region


# ── the components ──


def test_only_the_daemon_has_the_keys_of_the_bucket_and_the_pod_has_no_identity() -> None:
    documents = built("example")
    (daemon,), (trainer,) = pod(documents)["initContainers"], pod(documents)["containers"]
    keys = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    assert names_in_env(daemon) == {"TIERD_CONFIG", *keys}
    assert not names_in_env(trainer) & keys
    assert "serviceAccountName" not in pod(documents)
    assert pod(documents)["automountServiceAccountToken"] is False


def test_pod_monitor_scrapes_the_port_of_the_sidecar(tmp_path: Path) -> None:
    documents = built("example")
    monitor = documents["PodMonitor"]
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["spec"].keys() == {"selector", "podMetricsEndpoints"}
    labels = documents["Job"]["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"].keys() == {"matchLabels"}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint.keys() == {"port", "path", "interval", "relabelings"}
    containers = [*pod(documents)["initContainers"], *pod(documents)["containers"]]
    ports = [(one["name"], port["name"]) for one in containers for port in one.get("ports", [])]
    assert [name for name, port in ports if port == endpoint["port"]] == ["tierd"]
    with serving(tmp_path) as daemon:
        assert daemon.request(endpoint["path"])[0] == 200


def test_pod_monitor_gives_the_label_that_the_rules_select() -> None:
    """The operator's own value of `job` is NAMESPACE/NAME."""
    documents = built("example")
    (endpoint,) = documents["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "tierd"}]
    assert 'up{job="tierd"}' in str(documents["PrometheusRule"])


def test_daemons_are_not_scraped_by_annotations_as_well() -> None:
    assert "annotations" not in built("example")["Job"]["spec"]["template"]["metadata"]
    assert "annotations" in built("base")["Job"]["spec"]["template"]["metadata"]


def test_rules_of_the_operator_are_those_of_the_alerts_file() -> None:
    assert prometheus_rule.FILE.read_text(encoding="utf-8") == prometheus_rule.text(), (
        "run: python -m tests.support.prometheus_rule"
    )
    rule = built("example")["PrometheusRule"]
    assert rule["apiVersion"] == "monitoring.coreos.com/v1"
    alerts = yaml.safe_load(prometheus_rule.ALERTS.read_text(encoding="utf-8"))
    assert rule["spec"] == alerts
    for group in rule["spec"]["groups"]:
        assert group.keys() == {"name", "rules"}
        for each in group["rules"]:
            assert each.keys() - {"for"} == {"alert", "expr", "labels", "annotations"}
