"""What a loss now costs, by what survives it."""

from __future__ import annotations

from tierd.status.work_at_risk import RestartPoint, RiskReport, work_at_risk

SOURCES = {
    "memory": RestartPoint(1, 120, 5.0),
    "hot": RestartPoint(1, 110, 15.0),
    "cold": RestartPoint(1, 100, 65.0),
    "dr": RestartPoint(1, 60, 400.0),
}


def test_each_loss_costs_the_time_since_the_newest_checkpoint_that_survives_it() -> None:
    restores_s = {"memory": 0.5, "cold": 90.0}
    trainers, node, region = work_at_risk(SOURCES, world_size=8, is_running=True, step_s=2.0, restore_s=restores_s)
    assert trainers == RiskReport(
        lost="trainers", tier="memory", step=120, seconds=5.0, gpu_seconds=40.0, steps=2, restore_s=0.5
    )
    assert node == RiskReport(
        lost="node", tier="cold", step=100, seconds=65.0, gpu_seconds=520.0, steps=22, restore_s=90.0
    )
    assert (region.tier, region.seconds, region.steps, region.restore_s) == ("dr", 400.0, 62, None)


def test_without_a_tier_that_survives_all_work_is_lost() -> None:
    _, node, region = work_at_risk({"memory": SOURCES["memory"]}, world_size=1, is_running=True)
    assert (node, region) == (RiskReport(lost="node"), RiskReport(lost="region"))
    _, node, region = work_at_risk({"cold": SOURCES["cold"]}, world_size=1, is_running=True)
    assert (node.tier, region.tier) == ("cold", None), "the only cold tier may be in the region that is lost"
    assert work_at_risk({}, world_size=1, is_running=True) == []


def test_a_cold_tier_on_the_disk_of_hot_is_lost_with_the_node() -> None:
    risks = work_at_risk(SOURCES, world_size=1, is_running=True, on_hot_disk={"cold"})
    assert [(risk.lost, risk.tier) for risk in risks] == [("trainers", "memory"), ("node", "dr"), ("region", None)]


def test_a_run_that_does_not_train_loses_no_more_with_time() -> None:
    trainers, node, _ = work_at_risk(SOURCES, world_size=2, is_running=False, step_s=2.0)
    assert (trainers.seconds, trainers.steps) == (0.0, 0)
    assert (node.seconds, node.gpu_seconds, node.steps) == (60.0, 120.0, 20)


def test_the_copy_on_another_node_survives_the_node_and_not_the_region() -> None:
    sources = {
        "all nodes": RestartPoint(1, 50, 1.0),
        "peer": RestartPoint(1, 40, 2.0),
        "cold": RestartPoint(1, 10, 3.0),
    }
    assert [risk.tier for risk in work_at_risk(sources, world_size=4, is_running=True)] == ["all nodes", "peer", None]


def test_a_newer_generation_is_newer_at_any_step_and_an_unknown_age_stays_unknown() -> None:
    sources = {"hot": RestartPoint(2, 10, None), "cold": RestartPoint(1, 500, 9.0)}
    trainers, node, _ = work_at_risk(sources, world_size=1, is_running=True, step_s=1.0)
    assert (trainers.tier, trainers.seconds, trainers.steps) == ("hot", None, 0)
    assert (node.tier, node.seconds, node.steps) == ("cold", 9.0, 0)


def test_a_start_that_has_saved_nothing_loses_its_own_work_and_not_the_time_before_it() -> None:
    """A run that rested for three days, and trains again for five minutes."""
    sources = {"hot": RestartPoint(1, 120, 3 * 86400.0), "cold": RestartPoint(1, 100, 3 * 86400.0 + 60.0)}
    trainers, node, _ = work_at_risk(sources, world_size=2, is_running=True, step_s=2.0, started_s=300.0)
    assert (trainers.seconds, trainers.gpu_seconds, trainers.steps) == (300.0, 600.0, 150)
    assert (node.seconds, node.steps) == (360.0, 170)
    trainers, _, _ = work_at_risk({"hot": RestartPoint(1, 120, None)}, world_size=2, is_running=True, started_s=300.0)
    assert trainers.seconds == 300.0


def test_trainers_that_hang_have_done_no_work_since() -> None:
    trainers, node, _ = work_at_risk(SOURCES, world_size=1, is_running=True, step_s=2.0, silent_s=3.0)
    assert (trainers.seconds, trainers.steps) == (2.0, 1)
    assert (node.seconds, node.steps) == (62.0, 21)
    trainers, _, _ = work_at_risk(SOURCES, world_size=1, is_running=True, step_s=2.0, silent_s=9.0)
    assert (trainers.seconds, trainers.steps) == (0.0, 0)
