"""The documents say what the code does: links lead somewhere, names exist, tables and examples are the code's own."""

from __future__ import annotations

import ast
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from prometheus_client import CollectorRegistry
from safetensors.torch import load

from generators.pages import PAGES
from tierd import __version__
from tierd.cli.app import make_app
from tierd.config.sections import Config
from tierd.format import checksum, layout, manifest, shard, wire
from tierd.format.ids import Rank
from tierd.format.node_file import NodeFile
from tierd.memory.slot import TRANSITIONS
from tierd.metrics import Metrics

ROOT = Path(__file__).parents[1]
DOCS = {
    path.relative_to(ROOT).as_posix(): path
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md")])
}
SOURCES = {
    path.relative_to(ROOT).as_posix(): path
    for folder in ("tierd", "client", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
}
FORMAT = (ROOT / "docs/FORMAT.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs/ARCHITECTURE.md").read_text(encoding="utf-8")
RELIABILITY = (ROOT / "docs/RELIABILITY.md").read_text(encoding="utf-8")


def refuse(found: list[str], why: str) -> None:
    """Fails with one finding a line, so that nothing of the list is cut off."""
    if found:
        pytest.fail("\n".join([why, *(f"  {one}" for one in sorted(set(found)))]), pytrace=False)


# ── reading Markdown ──


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```(?:{language})\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def words(text: str) -> list[str]:
    """What stands between backticks in the prose, as one line each."""
    return [" ".join(word.split()) for word in re.findall(r"`([^`]+)`", without_blocks(text))]


def anchors(text: str) -> set[str]:
    """As GitHub makes them from headings."""
    headings = re.findall(r"^#+ (.+)$", without_blocks(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def rows(text: str, *heads: str) -> list[list[str]]:
    """The rows of every table with these heads, as cells."""
    found: list[list[str]] = []
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if _cells(line) == list(heads):
            for row in lines[index + 2 :]:
                if not row.startswith("|"):
                    break
                found.append(_cells(row))
    assert found, f"there is no table {heads}"
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []


# ── names and links ──


def test_links_have_a_target() -> None:
    """A file of the repository, or, from a page of the site, a page that the build generates."""
    missing: list[str] = []
    for name, path in DOCS.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", without_blocks(text_of(path))):
            if re.match(r"[a-z]+:", link):
                continue
            file, _, anchor = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            page = target.relative_to(ROOT / "docs").as_posix() if target.is_relative_to(ROOT / "docs") else ""
            if target.is_file():
                is_there = not anchor or anchor in anchors(text_of(target))
            elif page in PAGES and path.is_relative_to(ROOT / "docs"):
                is_there = not anchor or anchor in anchors(PAGES[page]())
            else:
                is_there = target.is_dir() and not anchor
            if not is_there:
                missing.append(f"{name}: {link}")
    refuse(missing, "links without a target:")


def test_every_section_that_a_message_or_an_alert_names_exists() -> None:
    missing: list[str] = []
    deployed = [path for path in (ROOT / "deploy").rglob("*") if path.is_file()]
    for path in [*SOURCES.values(), *(ROOT / "grafana").glob("*"), *deployed]:
        for page, anchor in re.findall(r"docs/([\w/-]+\.md)#([\w-]+)", text_of(path)):
            if anchor not in anchors(text_of(ROOT / "docs" / page)):
                missing.append(f"{path.relative_to(ROOT)}: docs/{page}#{anchor}")
    refuse(missing, "no such section:")


def test_every_test_that_is_named_exists() -> None:
    known: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        known |= {path.stem, *re.findall(r"def (test_\w+)", text_of(path))}
    found = [(name, test) for name, path in DOCS.items() for test in re.findall(r"\btest_\w+", text_of(path))]
    refuse([f"{name}: {test}" for name, test in found if test not in known], "tests that do not exist:")


def test_every_row_about_an_attacker_names_its_tests() -> None:
    page = text_of(ROOT / "docs/guides/security.md")
    heads = [_cells(line) for line in page.splitlines() if line.startswith("|") and _cells(line)[-1] == "test"]
    attacked = [row for head in heads for row in rows(page, *head)]
    refuse([row[-2][:80] for row in attacked if "`test_" not in row[-1]], "rows without a test:")
    named = {cell.lower() for row in attacked for cell in row[:1]}
    titles = " ".join(anchors(page))
    sections = ("can-write-to-a-bucket", "can-delete-in-a-bucket", "compromised-trainer", "compromised-daemon")
    lacking = [each for each in sections if each not in titles]
    lacking += [each for each in ("another user of the node", "network", "web page") if each not in " ".join(named)]
    refuse(lacking, "attackers without a table:")


def test_every_path_that_is_named_exists() -> None:
    rooms = r"(?:tierd|client|tests|docs|deploy|grafana|bench|examples|\.ci)/[\w./-]*\w"
    missing = [
        f"{name}: {word}"
        for name, path in DOCS.items()
        for word in words(text_of(path))
        if re.fullmatch(rooms, word) and not (ROOT / word).exists()
    ]
    refuse(missing, "paths that do not exist:")


OUTSIDE = {
    *("HuggingFaceStorageReader", "init_process_group", "get_optimizer_state_dict"),  # torch.distributed
    *("state_dict", "load_state_dict", "DataLoader", "DistributedSampler", "Embedding"),  # torch
    "StatefulDataLoader",  # torchdata
    *("train", "TrainerState", "save_state", "IterableDataset"),  # Hugging Face, torch
    *("register_for_checkpointing", "fit"),  # Accelerate, Lightning
    *("EarlyStopping", "GradientAccumulationScheduler", "MetricCollection", "ModelCheckpoint", "Timer"),  # Lightning
    "train_dataloader",  # Lightning
    *("Enum", "NewType", "Protocol"),  # Python
    *("StringLike", "StringLikeIfExists"),  # IAM
    "WatchdogSec",  # systemd
    "BlockingError",  # blockbuster
}


def test_every_function_and_class_that_is_named_exists() -> None:
    """`Restorer.find()`, `Sealed`, `DaemonUnreachable`, `TierdHalted`: in our code, or in our alerts."""
    source = "\n".join(text_of(path) for path in SOURCES.values())
    defined = set(re.findall(r"^ *(?:async )?(?:def|class) (\w+)", source, re.MULTILINE))
    defined |= set(re.findall(r"alert: (\w+)", text_of(ROOT / "grafana/alerts.yml"))) | OUTSIDE
    strange: list[str] = []
    for name, path in DOCS.items():
        for word in words(text_of(path)):
            called = re.fullmatch(r"((?:\w+\.)*)(\w+)\([^`]*\)", word)
            if called:
                parts = [part for part in called[1].split(".") if part[:1].isupper()] + [called[2]]
            else:
                parts = [word] if re.fullmatch(r"(?:[A-Z][a-z]+)+", word) else []
            strange += [f"{name}: {word}" for part in parts if part not in defined]
    refuse(strange, "names that the code does not have:")


# ── configuration, verbs, metrics ──


def keys(struct: type[msgspec.Struct], above: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(struct):
        kind: Any = field.type
        inner = getattr(kind, "__args__", (kind,))[0]
        yield f"{above}{field.name}"
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            yield from keys(inner, f"{above}{field.name}.")


KEYS = frozenset(keys(Config))
VARIABLES = {
    *(f"TIERD_{key.replace('.', '_').upper()}" for key in KEYS),
    *("TIERD_CONFIG", "TIERD_SOCKET", "TIERD_RESUME", "TIERD_DEADLINE", "TIERD_STOP_FILE", "TIERD_TRACEBACK"),
    *("TIERD_SECTION_KEY", "TIERD_FAILPOINTS", "TIERD_KEY_FILE", "TIERD_RUN_SECRET"),
}


def test_every_config_key_and_variable_that_is_named_exists() -> None:
    sections = "|".join(field.name for field in msgspec.structs.fields(Config))
    strange: list[str] = []
    for name, path in DOCS.items():
        text = text_of(path)
        named = [word for word in words(text) if re.fullmatch(rf"(?:{sections})\.[a-z_.]+", word)]
        strange += [f"{name}: {word}" for word in named if word not in KEYS and not word.endswith((".py", ".toml"))]
        variables = re.findall(r"\bTIERD_[A-Z_]+\b", text)
        strange += [f"{name}: {variable}" for variable in variables if variable not in VARIABLES]
    refuse(strange, "keys or variables that do not exist:")


def test_every_config_example_is_valid() -> None:
    for path in DOCS.values():
        for block in blocks(text_of(path), "toml"):
            msgspec.toml.decode(block.encode(), type=Config)


VERBS: Any = typer.main.get_command(make_app())


def test_every_command_that_is_shown_exists_with_its_options() -> None:
    strange: list[str] = []
    for name, path in DOCS.items():
        for command in commands(text_of(path)):
            parts = command.replace("\\|", "|").split()[1:]
            first = next((part for part in parts if re.fullmatch(r"[a-z]+", part)), None)
            if first is not None and first not in VERBS.commands:
                strange.append(f"{name}: {command}: there is no verb {first}")
                continue
            known = options_of(VERBS) | (options_of(VERBS.commands[first]) if first else set[str]())
            flags = {re.sub(r"[\]=].*$", "", part.lstrip("[")) for part in parts if part.lstrip("[").startswith("--")}
            strange += [f"{name}: {command}: there is no {flag}" for flag in flags - known]
    refuse(strange, "commands that do not exist:")


def commands(text: str) -> list[str]:
    """`tierd …` in prose, and in blocks after a prompt or at the beginning of a line, where no table is."""
    in_prose = [word for word in words(text) if word.startswith("tierd ")]
    shown = r"^\s*(?:\$ )?(?:\.venv/bin/)?(tierd (?! )[^#\n]+)"
    in_blocks = re.findall(shown, "\n".join(blocks(text, "sh|")), re.MULTILINE)
    return [re.sub(r"--config \S+", "", command) for command in [*in_prose, *in_blocks]]


def options_of(command: Any) -> set[str]:
    return {"--help", *(option for parameter in command.params for option in parameter.opts)}


def test_every_metric_that_is_named_exists() -> None:
    families = {one.name for one in Metrics(CollectorRegistry()).registry.collect()}
    known = {f"{family}{end}" for family in families for end in ("", "_total", "_bucket", "_sum", "_count")}
    strange = [
        f"{name}: {word}"
        for name, path in DOCS.items()
        for word in words(text_of(path))
        if re.fullmatch(r"tierd_[a-z_]+(\{.*\})?", word) and re.sub(r"\{.*", "", word) not in known | {"tierd_client"}
    ]
    refuse(strange, "metrics that do not exist:")


# ── docs/ARCHITECTURE.md ──


def test_every_room_has_a_line() -> None:
    rooms = {path.rpartition("/")[0] for path in SOURCES if path.endswith("/__init__.py")} - {"tierd"}
    refuse(sorted(rooms - set(words(ARCHITECTURE))), "docs/ARCHITECTURE.md has no line for:")


def test_every_invariant_names_a_test_that_holds_it() -> None:
    for name, _, tests in rows(ARCHITECTURE, "name", "promise", "held by"):
        assert re.search(r"`test_\w+`", tests), f"no test holds {name}"


def test_every_invariant_has_a_daemon_that_breaks_it() -> None:
    invariants = [name for name, *_ in rows(ARCHITECTURE, "name", "promise", "held by")]
    broken = {
        name: tests
        for name, _, tests, _ in rows(RELIABILITY, "invariant", "what is broken", "test", "battery that catches it")
    }
    assert list(broken) == invariants
    for name, tests in broken.items():
        assert re.search(r"`test_\w+`", tests), f"no test breaks {name}"


def test_every_failure_of_a_node_has_a_test_and_says_if_it_is_a_long_one() -> None:
    sources = [text_of(path) for path in (ROOT / "tests").rglob("test_*.py")]
    for failure, _, _, held_by in rows(RELIABILITY, "What fails", "Then", "Lost", "Test"):
        found = re.fullmatch(r"`(test_\w+)`( \(long\))?", held_by)
        assert found, f"{failure}: {held_by}"
        source = next((text for text in sources if re.search(rf"def {found[1]}\(", text)), "")
        assert source, f"{failure}: there is no {found[1]}"
        is_long = "pytestmark = pytest.mark.long" in source or f"@pytest.mark.long\ndef {found[1]}(" in source
        assert is_long == bool(found[2]), f"{failure}: {held_by}"


DECISION_STATUS = r"- Status: (?:accepted|superseded by).*?\n- Date: \d{4}-\d\d-\d\d"


def test_decisions_are_numbered_without_a_gap_and_say_all_three_things() -> None:
    """Each opens with number, title, status and date, then has context, decision and consequences."""
    pages = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
    assert [page.name[:4] for page in pages] == [f"{number:04d}" for number in range(1, len(pages) + 1)]
    for number, page in enumerate(pages, 1):
        head = rf"# {number}\. [^\n]+\n\n{DECISION_STATUS}\n\n## Context\n"
        assert re.match(head, text_of(page), re.DOTALL), page.name
        assert {"context", "decision", "consequences"} <= anchors(text_of(page)), page.name


def test_the_changelog_begins_with_the_version_of_the_code() -> None:
    headings = re.findall(r"^## \[(.+?)\]", text_of(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == __version__


# ── docs/FORMAT.md: the example ──


GOLDEN = ROOT / "tests/golden/golden/000000000005-g0003"
GOLDEN_SHARD = GOLDEN / layout.shard_name(Rank(0), 1)


def hexdump(raw: bytes) -> str:
    """As `hexdump -C` prints it."""
    lines: list[str] = []
    former = b""
    for offset in range(0, len(raw), 16):
        row = raw[offset : offset + 16]
        if row == former:
            if lines[-1] != "*":
                lines.append("*")
            continue
        former = row
        shown = "".join(chr(one) if 32 <= one < 127 else "." for one in row)
        lines.append(f"{offset:08x}  {row[:8].hex(' '):<23}  {row[8:].hex(' '):<23}  |{shown}|")
    return "\n".join([*lines, f"{len(raw):08x}"]) + "\n"


def undump(text: str) -> bytes:
    raw = bytearray()
    for line in text.splitlines():
        if line == "*":
            continue
        at = int(line[:8], 16)
        raw += bytes(raw[-16:]) * ((at - len(raw)) // 16)
        raw += bytes.fromhex(line[10:58])
    return bytes(raw)


def test_hexdump_is_that_of_the_golden_shard() -> None:
    """Which test_shard.py compares with what the code writes."""
    (shown,) = blocks(FORMAT, "hexdump")
    assert shown == hexdump(GOLDEN_SHARD.read_bytes())


def test_hexdump_decodes_as_the_text_says() -> None:
    (shown,) = blocks(FORMAT, "hexdump")
    raw = undump(shown)
    assert struct.unpack_from("<Q", raw) == (0x1FF8,)
    parsed = shard.parse_header(raw, len(raw), where="the example")
    assert parsed.header_bytes == 0x2000
    told = rows(FORMAT, "offset", "tensor", "dtype, shape", "value")
    assert [words(row[1]) for row in told] == [[name] for name in parsed.tensors]
    tensors = load(raw)
    for offset, name, kind, value in told:
        entry = parsed.tensors[name.strip("`")]
        assert (int(offset, 16), kind) == (entry.offset, f"{entry.dtype} {list(entry.shape)}")
        assert re.sub(r"\s", "", str(tensors[entry.name].tolist())) == re.sub(r"\s", "", value)


def test_manifest_that_is_shown_is_the_golden_one_and_fits_the_shard() -> None:
    (shown,) = blocks(FORMAT, "json")
    assert shown.encode() == (GOLDEN / layout.MANIFEST).read_bytes()
    read = manifest.decode(shown.encode(), where="the example")
    raw = GOLDEN_SHARD.read_bytes()
    ranges = checksum.chunk_ranges(len(raw), read.files[0].chunk_bytes)
    chunks = [checksum.crc64nvme(raw[offset : offset + length]) for offset, length in ranges]
    assert read.files == [manifest.file_entry(GOLDEN_SHARD.name, len(raw), read.files[0].chunk_bytes, chunks)]


def test_message_that_is_shown_is_what_the_code_sends() -> None:
    assert f"`{wire.encode(wire.Abandon(slot=1)).hex(' ')}`" in FORMAT


# ── docs/FORMAT.md: the tables ──


def test_checksum_is_the_one_that_the_parameters_describe() -> None:
    polynomial = int(f"{0xAD93D23594C93659:064b}"[::-1], 2)
    assert f"0x{polynomial:x}" in FORMAT
    sum_ = (1 << 64) - 1
    for byte in b"123456789":
        sum_ ^= byte
        for _ in range(8):
            sum_ = (sum_ >> 1) ^ (polynomial if sum_ & 1 else 0)
    sum_ ^= (1 << 64) - 1
    assert checksum.crc64nvme(b"123456789") == sum_
    assert f"0x{sum_:x}" in FORMAT
    assert f"`{checksum.encode(sum_)}`" in FORMAT
    assert f"`{checksum.encode(checksum.crc64nvme(b''))}`" in FORMAT


def test_fields_of_the_manifest_are_those_of_the_code_in_their_order() -> None:
    told = [row[0].strip("`") for row in rows(FORMAT, "field", "type", "meaning", "limits")]
    assert told == [*manifest.Manifest.__struct_fields__, *manifest.FileEntry.__struct_fields__]


def test_fields_of_a_node_file_are_those_of_the_code_in_their_order() -> None:
    told = [row[0].strip("`") for row in rows(FORMAT, "field of a node file", "type", "meaning")]
    own = NodeFile.__struct_encode_fields__[len(manifest.Head.__struct_fields__) :]
    last = ("files", "signature")
    assert told == [*(name for name in own if name not in last), *last]


def test_every_message_is_there_with_its_fields() -> None:
    told = {row[0].strip("`"): words(row[1]) for row in rows(FORMAT, "message", "fields", "descriptors", "meaning")}
    messages: tuple[type[msgspec.Struct], ...] = (*wire.ToDaemon.__args__, *wire.ToClient.__args__)
    assert told == {message.__struct_config__.tag: list(message.__struct_fields__) for message in messages}


def test_states_of_a_slot_are_those_of_the_table_in_the_code() -> None:
    told = {(row[0], row[1]): row[2] for row in rows(FORMAT, "state", "event", "next state", "who")}
    assert told == {(state.value, event.value): after.value for (state, event), after in TRANSITIONS.items()}


def test_dtypes_are_those_of_the_code() -> None:
    told = {dtype: int(row[0]) for row in rows(FORMAT, "bytes", "dtypes") for dtype in words(row[1])}
    assert told == shard.DTYPE_BYTES


def test_every_tag_of_the_code_is_told() -> None:
    told = {tag for row in rows(FORMAT, "tag", "content", "value") for tag in words(row[0])}
    trees = [
        ast.parse(text_of(SOURCES[path]))
        for path in ("tierd/format/tagged.py", "client/tierd_client/state/encoding.py")
    ]
    used = {
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"\$[a-z]+", node.value)
    }
    assert told == used


@pytest.mark.parametrize(
    ("shown", "meant"),
    [
        ("100,000,000", shard.HEADER_BYTES_MAX),
        ("64 dimensions", shard.NDIM_MAX),
        ("64 MiB", manifest.MANIFEST_BYTES_MAX >> 20),
        ("67108864", checksum.CHUNK_BYTES),
        ("at most 64 KiB", wire.MESSAGE_BYTES_MAX >> 10),
        ("at most 253", wire.DESCRIPTORS_MAX),
    ],
)
def test_limits_are_those_of_the_code(shown: str, meant: int) -> None:
    assert shown in " ".join(FORMAT.split())
    assert int(re.sub(r"\D", "", shown)) == meant


def test_fields_that_a_reader_does_not_know_are_passed_by() -> None:
    """What FORMAT.md allows to come without a new version."""
    raw = (GOLDEN / layout.MANIFEST).read_bytes()
    known = manifest.decode(raw, where="golden")
    later = msgspec.json.decode(raw)
    later["seen_by"] = later["files"][0]["colour"] = "a later tierd"
    assert manifest.decode(msgspec.json.encode(later), where="a later one") == known
    message = msgspec.msgpack.encode({"type": "Abandon", "slot": 1, "why": "a later tierd"})
    assert wire.decode_to_daemon(message) == wire.Abandon(slot=1)
