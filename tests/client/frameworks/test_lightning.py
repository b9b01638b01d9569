"""A Lightning training that is killed in the middle of an epoch ends bit for bit as an undisturbed one."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy
from tierd_client import DictState, Mismatch, Unsupported, connect
from tierd_client.frameworks.lightning import TierdCallback
from tierd_client.frameworks.watched_loader import WatchedLoader
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.support.daemon import Daemon
from tests.support.forks import Done, Forks, write
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning suggests how to make the small training faster
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

EPOCHS, BATCHES = 4, 10
STEPS = EPOCHS * BATCHES


class Rows(Dataset[torch.Tensor]):
    """A dataset that draws from the same generators as the training."""

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((6,), float(index)) + torch.randn(6)


class Stream(IterableDataset[torch.Tensor]):
    """A dataset without a length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (torch.full((6,), float(index)) for index in range(4 * BATCHES))


class Net(lightning.LightningModule):
    """Dropout, running statistics, a scheduler, and an average kept in the module's own hook."""

    def __init__(self, log_file: Path, killed_at: int | None = None, stopped_at: int | None = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.register_buffer("average", torch.zeros(8, 6))
        self.log_file, self.killed_at, self.stopped_at = log_file, killed_at, stopped_at

    def write(self, **facts: Any) -> None:
        with self.log_file.open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        step = self.global_step + 1
        if step == self.killed_at:
            signal.raise_signal(signal.SIGKILL)
        if step == self.stopped_at:
            signal.raise_signal(signal.SIGTERM)
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        self.write(step=step, loss=loss.item())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.lerp_(self.net[0].weight.detach(), 0.1)
        self.write(step=self.global_step, average=self.average.sum().item())

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.write(step=self.global_step, validated=self.net(batch).square().mean().item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(kind: str) -> Any:
    if kind == "stateful":
        return StatefulDataLoader(Rows(), batch_size=4, shuffle=True)
    if kind == "stream":
        return DataLoader(Stream(), batch_size=4)
    return DataLoader(Rows(), batch_size=4, shuffle=True, generator=torch.Generator() if kind == "generator" else None)


def fit(
    kind: str, log_file: Path, callback: TierdCallback | None, *, seed: int = 1, epochs: int = EPOCHS, **net: Any
) -> lightning.Trainer:
    lightning.seed_everything(seed, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        val_check_interval=5,
        callbacks=[callback] if callback else [],
        accelerator="cpu",
        **dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False),
    )
    trainer.fit(Net(log_file, **net), loader(kind), DataLoader(Rows(), batch_size=20))
    return trainer


def main(options: dict[str, Any]) -> object:
    """`fit` in another process, which ends with a line with the step that was resumed."""
    callback = TierdCallback(options["kind"], socket=options["socket"], every_steps=4)
    trainer = fit(options["kind"], Path(options["log_file"]), callback, seed=options["seed"], **options["net"])
    write(options["lines"], resumed=callback.found.step if callback.found else None)
    return trainer


def facts_of(log_file: Path, since: int = 0) -> list[dict[str, Any]]:
    return [fact for line in log_file.read_text().splitlines() if (fact := json.loads(line))["step"] > since]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("daemon"), more="[lifecycle.hot]\nkeep_last = 20\n") as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def gradients_on() -> Iterator[None]:
    """A fit that raised may leave gradients disabled, but no signal handler."""
    handler = signal.getsignal(signal.SIGTERM)
    with torch.enable_grad():
        yield
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize("kind", [pytest.param("plain", marks=pytest.mark.long), "stateful"])
def test_lightning_training_killed_in_an_epoch_resumes_identically(kind: str, daemon: Daemon, tmp_path: Path) -> None:
    fit(kind, tmp_path / "undisturbed", None)

    with Forks(__name__, tmp_path) as forks:

        def start(name: str, seed: int, **net: int) -> Done:
            log_file = str(tmp_path / name)
            return forks.run(f"{kind}-{name}", kind=kind, log_file=log_file, socket=daemon.socket, seed=seed, net=net)

        killed = start("killed", 1, killed_at=26)
        stopped = start("stopped", 2, stopped_at=37)
        last = start("last", 3)

    assert killed.codes == [-signal.SIGKILL]
    assert facts_of(tmp_path / "killed")[-1]["step"] == 25
    # Step 20 was the last of an epoch and was validated.
    assert daemon.json("show", kind, "20")["manifest"]["metrics"].keys() == {"loss"}

    assert stopped.codes == [0]
    assert stopped.lines == [[]], "it does not return from fit"
    assert facts_of(tmp_path / "stopped")[0]["step"] == 25
    assert facts_of(tmp_path / "stopped")[-1]["step"] == 37

    assert last.result["resumed"] == 37

    resumed = facts_of(tmp_path / "stopped") + facts_of(tmp_path / "last")
    assert len({fact["step"] for fact in resumed if "loss" in fact}) == STEPS - 24
    assert resumed == facts_of(tmp_path / "undisturbed", since=24)
    wait_until(lambda: any((daemon.hot / kind).glob(f"{STEPS:012d}-g*/manifest.json")), "the snapshot at the end")


@pytest.mark.parametrize("kind", [pytest.param("generator", marks=pytest.mark.long), "stream"])
def test_loaders_without_state_repeat_the_same_batches(kind: str, daemon: Daemon, tmp_path: Path) -> None:
    class Dies(Exception):
        pass

    class Dying(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if trainer.global_step == 13:
                raise Dies

    fit(kind, tmp_path / "undisturbed", None, epochs=2)
    callback = TierdCallback(kind, socket=daemon.socket, every_steps=6)
    callback.on_train_batch_start = Dying().on_train_batch_start
    with pytest.raises(Dies):
        fit(kind, tmp_path / "killed", callback, epochs=2)

    again = TierdCallback(kind, socket=daemon.socket, every_steps=6)
    fit(kind, tmp_path / "resumed", again, seed=7, epochs=2)
    assert again.found is not None
    assert again.found.step == 12
    assert facts_of(tmp_path / "resumed") == facts_of(tmp_path / "undisturbed", since=12)


def test_finished_training_can_be_extended(daemon: Daemon, tmp_path: Path) -> None:
    """`max_epochs` is not part of the state: two epochs and two more equal four."""
    fit("plain", tmp_path / "undisturbed", None, epochs=4)
    fit("plain", tmp_path / "first", TierdCallback("prolonged", socket=daemon.socket), epochs=2)
    fit("plain", tmp_path / "ended", (ended := TierdCallback("prolonged", socket=daemon.socket)), epochs=2)
    assert ended.found is not None
    assert not (tmp_path / "ended").exists()
    fit("plain", tmp_path / "second", TierdCallback("prolonged", socket=daemon.socket), epochs=4, seed=5)
    assert facts_of(tmp_path / "first") + facts_of(tmp_path / "second") == facts_of(tmp_path / "undisturbed")


def test_ckpt_path_takes_precedence_and_is_logged(
    daemon: Daemon, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = fit("plain", tmp_path / "other", None, epochs=1)
    trainer.save_checkpoint(tmp_path / "other.ckpt", weights_only=False)
    fit("plain", tmp_path / "first", TierdCallback("chosen", socket=daemon.socket), epochs=2)

    callback = TierdCallback("chosen", socket=daemon.socket)
    lightning.seed_everything(3, verbose=False)
    again = lightning.Trainer(max_epochs=2, callbacks=[callback], logger=False, enable_checkpointing=False)
    with caplog.at_level(logging.WARNING, logger="tierd_client"):
        again.fit(Net(tmp_path / "again"), loader("plain"), ckpt_path=str(tmp_path / "other.ckpt"), weights_only=False)
    assert callback.found is None
    assert facts_of(tmp_path / "again")[0]["step"] == BATCHES + 1
    assert "ckpt_path is given" in caplog.text


def test_run_of_another_kind_of_training_is_refused_before_anything_changes(daemon: Daemon, tmp_path: Path) -> None:
    with connect("foreign", socket=daemon.socket) as client:
        client.snapshot(1, DictState({"model": {"net.0.weight": torch.zeros(8, 6)}})).wait_persisted(60)
    with pytest.raises(Mismatch, match="not a snapshot of a Lightning training"):
        fit("plain", tmp_path / "log_file", TierdCallback("foreign", socket=daemon.socket))


def test_lightning_strategies_with_directory_checkpoints_are_refused_by_name(daemon: Daemon) -> None:
    callback = TierdCallback("sharded", socket=daemon.socket)
    trainer: Any = type("", (), {"strategy": FSDPStrategy()})()
    with pytest.raises(Unsupported, match="FSDPStrategy") as caught:
        callback.setup(trainer, None, "fit")
    assert "frameworks.dcp" in caught.value.hint
    assert callback.client is None


def test_watched_loader_without_a_resume_yields_what_lightnings_loader_yields() -> None:
    calls: list[None] = []
    torch.manual_seed(4)
    plain = DataLoader(Rows(), batch_size=4, shuffle=True)
    expected = [batch.tolist() for batch in plain]
    torch.manual_seed(4)
    watched = WatchedLoader(plain, "max_size_cycle", lambda: calls.append(None), torch.device("cpu"))
    assert [batch.tolist() for batch, _, _ in watched] == expected
    assert len(calls) == BATCHES + 1
