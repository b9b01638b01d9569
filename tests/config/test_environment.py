"""The names of environment variables: a misspelt one is refused, those of Kubernetes are ignored, and all are known."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.daemon import serving
from tierd.cli.app import make_app
from tierd.config.environment import OTHERS, SCALARS, check_names, unknown_names
from tierd.errors import BadConfig

ROOT = Path(__file__).parents[2]
SOURCES = ("tierd", "client", "deploy", "examples", "bench", "tests")
EXAMPLES = {"TIERD_LISTEN", "TIERD_SECTION_KEY"}  # in documentation


@pytest.mark.parametrize(
    ("name", "explained"),
    [
        ("TIERD_HOT_PAHT", "nothing reads $TIERD_HOT_PAHT; did you mean TIERD_HOT_PATH?"),
        ("TIERD_hot_path", "did you mean TIERD_HOT_PATH?"),
        ("TIERD_SOCKETS", "did you mean TIERD_SOCKET?"),
        ("TIERD_KEEP_LAST", "did you mean TIERD_LIFECYCLE_HOT_KEEP_LAST or TIERD_LIFECYCLE_COLD_KEEP_LAST?"),
        ("TIERD_COLD_URL", "only the config file sets cold"),
        ("TIERD_LISTEN_HOSTS", "only the config file sets listen.hosts"),
        ("TIERD_DAEMON_PORT", "nothing reads $TIERD_DAEMON_PORT"),
        ("TIERD_OTHER", "nothing reads $TIERD_OTHER"),
    ],
)
def test_a_name_that_nothing_reads_is_explained_without_its_value(name: str, explained: str) -> None:
    with pytest.raises(BadConfig, match=re.escape(explained)) as caught:
        check_names({name: "a-secret", "TIERD_HOT_PATH": "/nvme", "PATH": "/bin"})
    assert caught.value.exit_code == 2
    assert "a-secret" not in f"{caught.value}{caught.value.hint}"


def test_all_names_that_nothing_reads_are_told_at_once() -> None:
    assert len(unknown_names({"TIERD_A": "", "TIERD_B": "", "TIERD_CONFIG": ""})) == 2


def test_what_kubernetes_sets_for_services_of_that_name_is_ignored() -> None:
    of_a_service = {
        "SERVICE_HOST": "10.0.0.11",
        "SERVICE_PORT": "9464",
        "SERVICE_PORT_METRICS": "9464",
        "PORT": "tcp://10.0.0.11:9464",
        "PORT_9464_TCP": "tcp://10.0.0.11:9464",
        "PORT_9464_TCP_PROTO": "tcp",
        "PORT_9464_TCP_PORT": "9464",
        "PORT_9464_TCP_ADDR": "10.0.0.11",
    }
    for service in ("TIERD", "TIERD_FOO", "TIERD_HOT"):
        check_names({f"{service}_{name}": value for name, value in of_a_service.items()})


def test_every_variable_of_the_sources_is_known_and_every_known_one_is_read() -> None:
    texts = {
        path: path.read_text(encoding="utf-8", errors="replace")
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc" and path != Path(__file__).resolve()
    }
    used = {name for text in texts.values() for name in re.findall(r"\bTIERD_[A-Z0-9_]*[A-Z0-9]\b", text)}
    assert unknown_names(dict.fromkeys(used - EXAMPLES, "")) == []
    del texts[ROOT / "tierd/config/environment.py"]
    elsewhere = "\n".join(texts.values())
    assert [name for name in OTHERS if f'"{name}"' not in elsewhere and name != "TIERD_KEY_FILE"] == []
    assert not set(OTHERS) & set(SCALARS)


def test_a_daemon_refuses_a_misspelt_name_before_it_does_anything(tmp_path: Path) -> None:
    daemon = serving(tmp_path, environ={"TIERD_HOT_PAHT": "/nvme"})
    daemon.launch()
    assert daemon.wait_exit() == BadConfig.exit_code
    assert "did you mean TIERD_HOT_PATH?" in daemon.log
    assert not daemon.hot.exists()


def test_other_commands_name_it_on_stderr_and_go_on(tmp_path: Path) -> None:
    environ = {"TIERD_HOT_PAHT": "/nvme", "TIERD_HOT_PATH": str(tmp_path / "hot")}
    done = CliRunner().invoke(make_app(), ["runs", "--json"], env=environ)
    assert (done.exit_code, done.stdout.strip()) == (0, "[]")
    assert "tierd: nothing reads $TIERD_HOT_PAHT; did you mean TIERD_HOT_PATH?" in done.stderr
