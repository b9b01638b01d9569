"""What happens in one simulation: the machines, the jobs, and the events in order. All of it follows from the seed."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

from tests.support.simulation.trainer import Job

DRAWN = ("one node", "moves", "shared run", "shared folder", "lost shards")
SEVERAL_NODES = "several nodes"
COPIES = "copies"
SCENARIOS = (*DRAWN, "full disk", SEVERAL_NODES, COPIES)
"""
one node: jobs stay where they are.
moves: a job may start again on another node.
shared run: two jobs on two nodes use one run name, an error of their users, and a slow bucket. Claims and restores are
    not checked.
shared folder: as moves, with a directory as the cold tier.
lost shards: one node, and a slow bucket that loses shards of committed checkpoints.
full disk: one node, whose hot disk has space only for what it holds, or for nothing, again and again. In half of the
    cases the daemon is killed meanwhile. No seed draws it.
several nodes: one job over several nodes. No seed draws it. See nodes_world.py.
copies: as several nodes, which keep copies of each other's parts. No seed draws it.
"""


@dataclass(frozen=True)
class Event:
    """Happens `after_s` seconds after the one before. `target`: a job or a node; `argument`: a node or a number."""

    after_s: float
    action: str
    target: str = ""
    argument: str | float = ""

    def __str__(self) -> str:
        return f"+{self.after_s:.1f} s {self.action} {self.target} {self.argument}".rstrip()


@dataclass(frozen=True)
class Schedule:
    """`is_slow`: some requests to the bucket take minutes."""

    seed: int
    scenario: str
    nodes: list[str]
    jobs: list[Job]
    cold_list_interval_s: float
    page_keys: int
    ignores_conditions: bool
    is_slow: bool
    events: list[Event] = field(default_factory=list[Event])

    @property
    def snapshots(self) -> float:
        """About how many the ranks take: what the simulation costs grows with it."""
        return sum(event.after_s for event in self.events) * sum(job.world_size / job.interval_s for job in self.jobs)

    def without(self, first: int, count: int) -> Schedule:
        """The same without some events. Later ones keep their times."""
        left, removed = list(self.events), self.events[first : first + count]
        del left[first : first + count]
        if first < len(left):
            delay_s = sum(event.after_s for event in removed)
            left[first] = replace(left[first], after_s=left[first].after_s + delay_s)
        return replace(self, events=left)


def make_schedule(seed: int, scenario: str = "") -> Schedule:
    """`scenario`: empty: the seed decides."""
    if scenario in (SEVERAL_NODES, COPIES):
        return make_nodes_schedule(seed, scenario=scenario)
    rng = random.Random(seed)
    drawn = rng.choice(DRAWN)
    scenario = scenario or drawn
    is_fixed = scenario in ("lost shards", "shared run")  # a slow bucket that is listed often
    nodes = (
        ["node1"]
        if scenario in ("one node", "lost shards", "full disk")
        else [f"node{n}" for n in range(1, rng.randint(2, 3) + 1)]
    )
    count = 2 if scenario == "shared run" else rng.randint(1, 2)
    jobs = [
        Job(
            name=f"job{n}",
            run="run" if scenario == "shared run" else f"run{n}",
            world_size=rng.randint(1, 2),
            interval_s=rng.choice([20.0, 45.0, 90.0]),
        )
        for n in range(count)
    ]
    if scenario == "shared run":
        # With other steps, their checkpoints have other names, and only what one daemon does to the other's is left.
        jobs[0] = replace(jobs[0], world_size=rng.randint(1, 3))
        jobs[1] = replace(jobs[0], name=jobs[1].name, every_steps=rng.choice([10, 7]))
    schedule = Schedule(
        seed=seed,
        scenario=scenario,
        nodes=nodes,
        jobs=jobs,
        cold_list_interval_s=30.0 if is_fixed else rng.choice([30.0, 120.0, 600.0]),
        page_keys=rng.choice([5, 1000]),
        ignores_conditions=rng.random() < 0.3,
        is_slow=rng.random() < 0.4 or is_fixed,
    )
    starts = [Event(rng.uniform(0.0, 5.0), "start job", job.name, nodes[n % len(nodes)]) for n, job in enumerate(jobs)]
    drawn_events = [_draw(rng, schedule) for _ in range(rng.randint(3, 11))]
    if scenario == "full disk":
        drawn_events = [each for event in drawn_events for each in _with_kill(rng, event)]
    return replace(schedule, events=starts + drawn_events)


def _with_kill(rng: random.Random, event: Event) -> list[Event]:
    """The daemon may be killed while the disk is full: cold then has what hot lacks."""
    if not event.action.startswith("disk") or rng.random() < 0.5:
        return [event]
    return [event, Event(rng.uniform(30.0, 280.0), "kill daemon", event.target, rng.uniform(1.0, 40.0))]


def _draw(rng: random.Random, schedule: Schedule) -> Event:
    after_s = rng.choice([0.5, 10.0, 60.0, 150.0]) * rng.uniform(0.2, 1.8)
    job, node = rng.choice(schedule.jobs).name, rng.choice(schedule.nodes)
    stays = schedule.scenario not in ("moves", "shared folder")
    if schedule.scenario == "lost shards":
        return Event(rng.uniform(5.0, 60.0), "lose shard", "", rng.random())
    if schedule.scenario == "full disk":
        # Each ends before the next event: only then is it clear that the full disk stopped nothing.
        action = rng.choice(["disk fills", "disk is taken", "restart job", "kill daemon"])
        argument = rng.uniform(300.0, 600.0) if action.startswith("disk") else rng.uniform(1.0, 40.0)
        return Event(
            700.0, action, job if action == "restart job" else node, "" if action == "restart job" else argument
        )
    actions = {
        "restart job": (6, job, "" if stays else rng.choice(schedule.nodes)),
        "take over job": (1, job, "" if stays else rng.choice(schedule.nodes)),
        "kill daemon": (4, node, rng.uniform(1.0, 40.0)),
        "kill node": (3, node, rng.uniform(5.0, 120.0)),
        "lose disk": (1, node, rng.uniform(5.0, 120.0)),
        "bucket fails": (3, "", rng.uniform(5.0, 200.0)),
        "bucket errs": (3, "", rng.uniform(5.0, 200.0)),
        "disk errs": (2, node, rng.uniform(5.0, 60.0)),
        "lose shard": (2, "", rng.random()),
        "mark": (3, "", rng.random()),
        "nothing": (3, "", ""),
    }
    action = rng.choices(list(actions), [weight for weight, _, _ in actions.values()])[0]
    _, target, argument = actions[action]
    return Event(after_s, action, target, argument)


def make_nodes_schedule(seed: int, nodes: int = 0, scenario: str = SEVERAL_NODES) -> Schedule:
    """One job over `nodes` nodes, with one spare; 0: the seed decides."""
    rng = random.Random(seed)
    count = nodes or rng.choices([2, 3, 4, 8, 16], [20, 65, 12, 2, 1])[0]
    job = Job(
        name="job",
        run="run",
        world_size=2 * count,
        interval_s=rng.choice([20.0, 45.0, 90.0]),
        nodes=count,
    )
    schedule = Schedule(
        seed=seed,
        scenario=scenario,
        nodes=[f"node{n}" for n in range(1, count + 2)],
        jobs=[job],
        cold_list_interval_s=rng.choice([30.0, 120.0, 600.0]),
        page_keys=rng.choice([max(5, 3 * count // 2), 1000]),  # the files of a checkpoint are two pages, or one
        ignores_conditions=rng.random() < 0.2,
        is_slow=rng.random() < 0.3,
    )
    start = Event(rng.uniform(1.0, 5.0), "start job", job.name, rng.random())
    return replace(schedule, events=[start, *(_draw_over_nodes(rng, schedule) for _ in range(rng.randint(3, 14)))])


def _draw_over_nodes(rng: random.Random, schedule: Schedule) -> Event:
    after_s = rng.choice([0.5, 10.0, 60.0, 150.0]) * rng.uniform(0.2, 1.8)
    job, node = schedule.jobs[0].name, rng.choice(schedule.nodes)
    actions: dict[str, tuple[int, str, str | float]] = {
        "restart job": (5, job, rng.random()),
        "take over job": (2, job, rng.random()),
        "kill daemon": (4, node, rng.uniform(1.0, 90.0)),
        "kill at request": (6, node, float(rng.randint(1, 40))),
        "kill node": (2, node, rng.uniform(5.0, 120.0)),
        "lose disk": (3, node, rng.uniform(5.0, 120.0)),
        "cut off": (3, node, rng.uniform(5.0, 400.0)),
        "sleep": (4, node, rng.uniform(20.0, 400.0)),
        "bucket fails": (2, "", rng.uniform(5.0, 200.0)),
        "bucket errs": (3, "", rng.uniform(5.0, 200.0)),
        "stale listings": (3, "", rng.uniform(5.0, 200.0)),
        "disk fills": (1, node, rng.uniform(60.0, 400.0)),
        "disk is taken": (2, node, rng.uniform(60.0, 400.0)),
        "disk errs": (1, node, rng.uniform(5.0, 60.0)),
        "unhealthy": (3, node, ""),
        "mark": (3, "", rng.random()),
        "nothing": (2, "", ""),
    }
    if schedule.scenario == COPIES:
        one, other = rng.sample(schedule.nodes, 2)
        actions |= {
            "lose disk": (8, node, rng.uniform(5.0, 120.0)),
            "cut link": (6, f"{one}>{other}", rng.uniform(5.0, 400.0)),
            "slow links": (3, node, rng.uniform(5.0, 200.0)),
            "links break": (3, "", rng.uniform(5.0, 200.0)),
            "bucket fails": (4, "", rng.uniform(60.0, 600.0)),
        }
    action = rng.choices(list(actions), [weight for weight, _, _ in actions.values()])[0]
    _, target, argument = actions[action]
    return Event(after_s, action, target, argument)


def make_three_node_schedules() -> list[Schedule]:
    """Three nodes that keep copies, and all sequences of up to three of the events below, in all orders: each happens
    45 s after the one before, while snapshots are taken every 20 s. Of one seed each: the order of the callbacks is
    another one in each schedule, and not all orders are tried."""
    events = [
        *(Event(45.0, action, f"node{n}", 20.0) for action in ("lose disk", "kill daemon") for n in (1, 2, 3)),
        *(Event(45.0, "cut link", link, 60.0) for link in ("node1>node2", "node2>node3", "node3>node1")),
        Event(45.0, "bucket fails", "", 60.0),
    ]
    schedules: list[Schedule] = []
    job = Job(name="job", run="run", world_size=6, interval_s=20.0, nodes=3)
    for count in (1, 2, 3):
        for chosen in itertools.product(events, repeat=count):
            base = make_nodes_schedule(len(schedules), nodes=3, scenario=COPIES)
            base = replace(base, jobs=[job], ignores_conditions=False, is_slow=False, nodes=base.nodes[:3])
            start = Event(1.0, "start job", job.name, 0.1)
            schedules.append(replace(base, events=[start, *chosen]))
    return schedules
