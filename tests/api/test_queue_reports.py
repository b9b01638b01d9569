"""Bytes per second written to each tier."""

from __future__ import annotations

from tierd.api.queue_reports import SAMPLE_S, WINDOW_S, WriteRates


def test_the_rate_is_that_of_the_last_minute() -> None:
    now_s, written = [100.0], {"hot": 0, "cold": 500}
    rates = WriteRates(lambda: dict(written), lambda: now_s[0])
    assert rates.rates() == {}, "no time has passed"
    now_s[0] += 10
    written["hot"] = 200
    assert rates.rates() == {"hot": 20.0, "cold": 0.0}
    for _ in range(int(WINDOW_S / SAMPLE_S) + 1):
        rates.sample()
        now_s[0] += SAMPLE_S
    assert rates.rates()["hot"] == 0.0, "it was written earlier"
    written["hot"] += 650
    assert rates.rates()["hot"] == 650 / (WINDOW_S + SAMPLE_S)
