"""The status pages: each route, with a real catalog and memory tier. A browser visits them in tests/e2e."""

from __future__ import annotations

import html.parser

import msgspec

from tests.api.test_operator import House, house, with_history
from tests.support.rooms import RUN
from tests.support.slots import CREATED_AT
from tierd.copies import Reason
from tierd.errors import TierUnreachable
from tierd.format.ids import checkpoint_id
from tierd.web import pages

__all__ = ["house"]

STEP_7 = f"/runs/{RUN}/000000000007-g0001"


class Page(html.parser.HTMLParser):
    """The tags, the values of attributes and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.values: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.values += [value for _, value in attrs if value is not None]

    def handle_data(self, data: str) -> None:
        self.text += "".join(f" {word}" for word in data.split())


async def page(house: House, path: str, code: int = 200) -> Page:
    status, body, content_type = await house.get(path)
    assert (status, content_type) == (code, "text/html; charset=utf-8")
    return Page(body)


async def test_overview_shows_the_state_and_escapes_foreign_text(house: House) -> None:
    await with_history(house)
    hostile = "<script>alert(1)</script>&amp;\"'"
    house.rooms.incidents.record("list", TierUnreachable(hostile, hint=hostile))
    house.rooms.catalog.listing_failed("cold", hostile)
    house.rooms.catalog.tiers["hot"].unreadable[checkpoint_id(RUN, 7, 1)] = hostile
    shown = await page(house, "/")
    assert shown.tags.count("script") == 1, "its own"
    assert shown.text.count(hostile) >= 5
    for text in (RUN, "7 1 min 30 s ago", "2 of 2", "hot", "cold", "Failures"):
        assert text in shown.text, text


async def test_a_copy_in_progress_and_copies_that_were_given_up_are_shown(house: House) -> None:
    await with_history(house)
    house.rooms.catalog.set_copying("cold", checkpoint_id(RUN, 7, 1))
    house.rooms.context.copies.gave_up("cold", Reason.REPLACED, at_s=0.0)
    shown = await page(house, "/")
    assert f"{RUN}/000000000007-g0001" in shown.text
    assert "1 replaced" in shown.text


async def test_a_cold_tier_on_the_disk_of_hot_is_named_where_work_is_at_risk(house: House) -> None:
    await with_history(house)
    shown = await page(house, "/")
    assert "cold, on hot's disk" in shown.text
    assert "Lost with the node: cold, on hot's disk." in shown.text
    assert "pid 42" in shown.text


async def test_checkpoint_of_unknown_age_is_in_the_tables_and_not_in_the_picture(house: House) -> None:
    await with_history(house)
    entry = house.rooms.catalog.get(checkpoint_id(RUN, 7, 1))
    assert entry is not None
    house.rooms.catalog.add(msgspec.structs.replace(entry.manifest, created_at="some day"), "hot")
    assert "some day" in (await page(house, f"/runs/{RUN}")).text
    assert "1 checkpoints from step 8" in " ".join((await page(house, "/")).values)


async def test_run_page_lists_its_checkpoints_and_links_to_each(house: House) -> None:
    await with_history(house)
    shown = await page(house, f"/runs/{RUN}")
    assert STEP_7 in shown.values
    assert "memory, hot" in shown.text
    assert "best" in shown.text


async def test_checkpoint_page_says_where_it_is_why_and_how_to_restore_it(house: House) -> None:
    await with_history(house)
    shown = await page(house, STEP_7)
    assert f"tierd restore --run {RUN} --step 7 --generation 1 --to ./{RUN}-7" in shown.text
    assert f"tierd show {RUN} 7 --generation 1" in shown.text
    assert "cold nothing replicate milestone best" in shown.text
    assert "rank-00000-of-00002.safetensors" in shown.text
    assert "nothing: it is the first" in shown.text


async def test_what_is_not_there_is_404_and_escaped(house: House) -> None:
    await with_history(house)
    for path in (
        "/runs/none",
        "/runs/%3Cb%3E",
        f"/runs/{RUN}/000000000099-g0001",
        "/runs/%3Cb%3E/x",
        f"/runs/{RUN}/%3Cb%3E",
    ):
        shown = await page(house, path, 404)
        assert "b" not in shown.tags, path
        assert "There is no" in shown.text
    assert (await house.get("/static/pages.py"))[0] == 404
    assert (await house.get("/static/..%2Fpages.py"))[0] == 404


async def test_pages_allow_nothing_from_elsewhere_and_are_not_stored(house: House) -> None:
    await with_history(house)
    for path in ("/", f"/runs/{RUN}", STEP_7, "/runs/none", "/static/page.css", "/static/live.js"):
        async with house.client.get(path) as answer:
            assert {name: answer.headers[name] for name in pages.HEADERS} == pages.HEADERS
            body = await answer.text()
            assert "http://" not in body
            assert "https://" not in body
            assert " style=" not in body, "the policy would ignore it"


async def test_pages_of_many_checkpoints_are_bounded(house: House) -> None:
    await with_history(house)
    entry = house.rooms.catalog.get(checkpoint_id(RUN, 7, 1))
    assert entry is not None
    for step in range(1000, 3000):
        house.rooms.catalog.add(msgspec.structs.replace(entry.manifest, step=step, created_at=CREATED_AT), "hot")
    for path in ("/", f"/runs/{RUN}"):
        assert len((await house.get(path))[1]) < 200_000
    text = (await page(house, f"/runs/{RUN}")).text
    assert f"1802 older ones: tierd ls --run {RUN}" in text
    assert "1702 older checkpoints are not drawn" in text


async def test_only_some_of_many_runs_are_on_the_first_page(house: House) -> None:
    await with_history(house)
    entry = house.rooms.catalog.get(checkpoint_id(RUN, 7, 1))
    assert entry is not None
    for number in range(100):
        house.rooms.catalog.add(msgspec.structs.replace(entry.manifest, run=f"other-{number}"), "hot")
    shown = await page(house, "/")
    assert "71 more runs tierd runs" in shown.text
    assert RUN in shown.text, "its trainers are attached"


async def test_no_run_yet(house: House) -> None:
    await house.rooms.look()
    assert "None yet." in (await page(house, "/")).text
