"""docs/guides/upgrade.md: a daemon of the next protocol under a running trainer and back, by the page's commands."""

from __future__ import annotations

from pathlib import Path

import pytest
import tierd_client

from tests.e2e.test_daemon_upgraded import NEXT, of_protocol
from tests.support.cli import make_house
from tests.support.daemon import Daemon, serving
from tests.support.guide import Section
from tests.support.trainer import Trainer
from tests.support.waiting import wait_until
from tierd.errors import BadConfig, BadRequest
from tierd.format import wire

PAGE = "upgrade"
WARNINGS = 1  # of the doctor: cold is on the disk of hot


def save(trainer: Trainer) -> None:
    trainer.train(1)
    trainer.snapshot()
    trainer.wait_replicated()


def test_upgrade_under_a_trainer_and_back(tmp_path: Path) -> None:
    with Trainer() as trainer:
        with Daemon(tmp_path) as former:
            trainer.connect(former.socket)
            save(trainer)
            section = Section(PAGE, "Upgrade", {"TIERD_CONFIG": str(former.config)})
            assert f"protocol {wire.PROTOCOL_VERSION}" in section.run_next("tierd version")
            section.run_next("tierd doctor", expected=WARNINGS)
            assert former.stop() == 0
        with of_protocol(tmp_path, NEXT, cold='url = "file://cold"') as later:
            section.replaces("systemctl restart tierd")
            later.wait_attached()
            section.run_next("tierd status")
            save(trainer)
            wait_until(lambda: later.steps("hot") == later.steps("cold") == [1, 2], "both tiers")
            section.run_next("tierd status --check")
            assert "run" in section.run_next("tierd ls")
            section.run_next("tierd drill")
            section.assert_done()

            back = Section(PAGE, "Back", {"TIERD_CONFIG": str(later.config)})
            back.replaces("tierd stop --run RUN")  # this trainer is of the former version
            back.run_next("tierd doctor", expected=WARNINGS)
            assert later.stop() == 0
        with Daemon(tmp_path) as former:
            back.replaces("systemctl restart tierd")
            former.wait_attached()
            back.run_next("tierd status")
            save(trainer)
            assert former.steps("cold") == [1, 2, 3]
            back.assert_done()


def test_trainer_of_the_next_protocol_is_refused_by_the_former_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as daemon:
        monkeypatch.setattr(wire, "PROTOCOL_VERSION", NEXT)
        with pytest.raises(BadRequest, match=f"speaks protocol {NEXT}"):
            tierd_client.connect("run", socket=daemon.socket)


def test_a_key_that_the_former_version_does_not_know_is_a_mistake(tmp_path: Path) -> None:
    house = make_house(tmp_path, more="[later]\nnew = 1\n")
    assert (BadConfig.exit_code, house.tierd("doctor").exit_code, house.tierd("serve").exit_code) == (2, 2, 2)
