"""An elastic `torchrun` over several nodes, an agent and a daemon on each: a node is lost, and another one joins.

`python -m torch.distributed.run --nnodes=MIN:MAX` starts all ranks again with another world size. They go on from what
the nodes have: nothing becomes whole in cold. A short test of the same is in test_elastic.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tierd_client.loaders.sampler import ResumableSampler

from tests.e2e.test_nodes_copies import lose
from tests.e2e.test_nodes_peers import peers
from tests.e2e.test_nodes_restore import hold_cold
from tests.e2e.test_torchrun_nodes import Agent
from tests.support.daemon import Daemon
from tests.support.elastic_training import BATCH, SAMPLES, SEED, loss_of, make_model, make_optimizer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parents[1] / "support" / "elastic_training.py"
TIMEOUT_S = 240.0


class Events:
    """What all ranks of all starts have written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def all(self) -> list[dict[str, Any]]:
        lines = [line for path in self._folder.glob("events-*.jsonl") for line in path.read_text().splitlines(True)]
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def of(self, event: str, generation: int) -> list[dict[str, Any]]:
        found = [each for each in self.all() if (each["event"], each["generation"]) == (event, generation)]
        return sorted(found, key=lambda each: each["rank"])

    def wait_begun(self, world: int, *, after: int = 0) -> list[dict[str, Any]]:
        """The starts of all ranks of the newest generation, which is newer than `after` and has so many ranks."""

        def begun() -> list[dict[str, Any]]:
            newest = max((each["generation"] for each in self.all()), default=0)
            found = self.of("begun", newest)
            return found if newest > after and len(found) == world == found[0]["world"] else []

        return wait_until(begun, f"a start with {world} ranks", TIMEOUT_S)

    def lineage(self) -> list[int]:
        """For each step of the training, from step 1, the generation that counts."""
        generation = max(each["generation"] for each in self.all())
        (last,) = {each["step"] for each in self.of("finished", generation)}
        found: list[int] = []
        while generation:
            begun = self.of("begun", generation)[0]
            found = [generation] * (last - begun["step"]) + found
            last, generation = begun["step"], begun["from"]
        return found


def copied(daemons: Sequence[Daemon], generation: int) -> int:
    """The newest step of a generation of which every node's part has a copy."""
    names = [(daemon.hot / ".peers" / "run").glob(f"*-g{generation:04d}/node-*.json") for daemon in daemons]
    return min(max((int(path.parent.name.partition("-")[0]) for path in found), default=0) for found in names)


def second_copied(daemons: Sequence[Daemon], events: Events, generation: int) -> int:
    """As `copied`; 0 for the first snapshot, which may become whole in cold: one file of each node gets there."""
    first = min((each["step"] for each in events.of("snapshot", generation)), default=0)
    newest = copied(daemons, generation)
    return newest if 0 < first < newest else 0


@pytest.mark.parametrize(
    ("kind", "count", "lost"),
    [
        pytest.param("ddp", 2, 0, id="ddp, home of two nodes"),
        pytest.param("fsdp", 3, 1, id="fsdp2, one of three nodes"),
    ],
)
def test_an_elastic_torchrun_goes_on_with_the_nodes_that_are_left(
    tmp_path: Path, kind: str, count: int, lost: int
) -> None:
    """And with more when a node joins. Every sample is read once, the losses are those of a training that nothing
    disturbs, and each start has the bits of the snapshot that it goes on from."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # no node's, so any may be lost
    options = [
        f"--nnodes={count - 1}:{count}",
        "--rdzv-backend=c10d",
        "--rdzv-id=job",
        "--max-restarts=9",
        f"--rdzv-endpoint=127.0.0.1:{store.port}",
        "--rdzv-conf=is_host=0,last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=3",
    ]
    events = Events(tmp_path)

    def start(stack: ExitStack, daemon: Daemon) -> Agent:
        agent = Agent(daemon, *options, str(SCRIPT), str(tmp_path), kind)
        stack.callback(agent.kill)
        return agent

    with peers(tmp_path, *"abc"[:count]) as daemons, ExitStack() as stack:
        for daemon in daemons:
            hold_cold(daemon)
        agents = [start(stack, daemon) for daemon in daemons]
        first = events.wait_begun(count)[0]["generation"]
        safe = wait_until(lambda: second_copied(daemons, events, first), "copies of all parts", TIMEOUT_S)

        agents[lost].kill()
        lose(daemons[lost])
        fewer = events.wait_begun(count - 1, after=first)
        assert {each["step"] for each in fewer} == {fewer[0]["step"]}
        assert fewer[0]["step"] >= safe
        assert {each["tier"] for each in fewer} <= {"memory", "hot"}

        second = fewer[0]["generation"]
        wait_until(lambda: events.of("snapshot", second), "a snapshot of fewer nodes", TIMEOUT_S)
        daemons[lost].start()
        agents[lost] = start(stack, daemons[lost])
        more = events.wait_begun(count, after=second)
        (stopped,) = {max(each["step"] for each in events.of("step", second) if each["rank"] == 0)}
        assert {each["step"] for each in more} == {stopped}  # the ranks took a last snapshot before they were restarted
        assert sorted(each["tier"] for each in more)[-1] == "peer"

        (tmp_path / "finish").touch()
        for agent in agents:
            assert agent.process.wait(TIMEOUT_S) == 0, agent.log.read_text(errors="replace")
        in_cold = {path.parent.name for path in (tmp_path / "cold" / "run").glob("*/manifest.json")}
        used = {f"{each['step']:012d}-g{each['from']:04d}" for each in fewer + more}
        assert not in_cold & used
    check(events)


def check(events: Events) -> None:
    generations = events.lineage()
    assert len(generations) == SAMPLES // BATCH
    for generation in sorted(set(generations)):
        begun = events.of("begun", generation)
        if begun[0]["from"]:
            digests = {e["digest"] for e in events.of("snapshot", begun[0]["from"]) if e["step"] == begun[0]["step"]}
            assert digests == {each["digest"] for each in begun}
    steps = {generation: events.of("step", generation) for generation in set(generations)}
    trained = [
        [each for each in steps[generation] if each["step"] == step] for step, generation in enumerate(generations, 1)
    ]
    read = [sample for ranks in trained for each in ranks for sample in each["samples"]]
    assert sorted(read) == list(range(SAMPLES))
    assert [{each["loss"] for each in ranks} for ranks in trained] == [{loss} for loss in undisturbed()]


def undisturbed() -> list[float]:
    """The loss of each step."""
    model = make_model()
    optimizer = make_optimizer(model)
    losses: list[float] = []
    for samples in ResumableSampler(SAMPLES, batch_size=BATCH, seed=SEED, rank=0, world_size=1):
        loss = loss_of(model, samples)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert torch.isfinite(torch.tensor(losses)).all()
    return losses
