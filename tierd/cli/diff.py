"""`tierd diff`: what differs between two checkpoints, tensor by tensor, and in the other values of the state.

Reads both from their tiers, verified, through a few chunks of memory; writes nothing. They may have been written by
different numbers of ranks. Needs no daemon and no torch.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tierd.catalog.selectable import selectable_replicas
from tierd.cli import options
from tierd.cli.console import print_report, print_result, progress_bar, table
from tierd.cli.opened_tiers import OpenedTiers, open_tiers
from tierd.cli.options import check_one_place, parse_query, settings_of
from tierd.cli.replicas import Replicas
from tierd.config.sections import Config
from tierd.errors import BadConfig, Unsupported
from tierd.format.boxes import common_runs
from tierd.format.ids import AUTO
from tierd.format.shard import DTYPE_BYTES, Shard
from tierd.format.whole import Part, WholeTensor, whole_tensors
from tierd.lifecycle.selection import CheckpointQuery
from tierd.tiers.store import Progress
from tierd.transfer.verified_reader import VerifiedReader

if TYPE_CHECKING:
    from tierd.cli.tensor_numbers import Distance

BLOCK_BYTES = 4 << 20  # compared at once
VALUES_SHOWN = 20
_CHECKPOINT = re.compile(r"(?:(?P<run>[^/:]+)/)?(?P<step>milestone:.+|latest|[0-9]+)(?:-g(?P<generation>[0-9]+))?")


class TensorDifference(msgspec.Struct, kw_only=True):
    """One tensor that both have. `differing`: elements with other bytes. `max_abs`, `max_rel`: the largest |b - a|, and
    the largest |b - a| / max(|a|, |b|). `norm_*`: Euclidean; `relative`: norm_difference / norm_a, None where that is
    0. `not_finite`: elements that are not finite in one of them; they count in no other number but `differing`.
    `problem`: why the two cannot be compared, as "F32 [2, 3] and F32 [2, 4]"; then all numbers are 0."""

    name: str
    dtype: str
    shape: list[int]
    elements: int = 0
    differing: int = 0
    not_finite: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    norm_a: float = 0.0
    norm_b: float = 0.0
    norm_difference: float = 0.0
    relative: float | None = None
    problem: str = ""

    @property
    def is_equal(self) -> bool:
        return not self.differing and not self.problem


class ValueDifference(msgspec.Struct, kw_only=True):
    """A value of the state that is no tensor. `a`, `b`: as JSON; None where one lacks it."""

    path: str
    a: str | None
    b: str | None


class Difference(msgspec.Struct, kw_only=True):
    """What `tierd diff --json` prints. `a`, `b`: the checkpoints. `values`: of rank 0, and what other ranks have
    otherwise, if as many ranks wrote both."""

    a: str
    b: str
    is_equal: bool
    tensors: list[TensorDifference]
    only_a: list[str]
    only_b: list[str]
    values: list[ValueDifference]


async def diff(
    context: typer.Context,
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint: [RUN/]STEP, latest or milestone:NAME.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one. STEP-gG names a generation too.")],
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="GLOB", help="Only tensors whose names match, as 'model.*'; may be repeated."),
    ] = None,
    run: options.RunName = None,
    tier: options.TierName = None,
    place: options.From = None,
    everything: Annotated[bool, typer.Option("--all", help="Also print the tensors that are equal.")] = False,
    json: options.Json = False,
) -> int:
    """Compare two checkpoints: per tensor the largest differences and the norms."""
    check_one_place(place, tier)
    queries = [parse_checkpoint(text, run, tier=place or tier or AUTO) for text in (a, b)]
    settings = settings_of(context)
    async with open_tiers(settings, place=place, only=tier) as tiers, AsyncExitStack() as stack:
        tiers.check_reachable()
        config = None if place else settings.config()
        opened = [await stack.enter_async_context(_replicas(query, tiers, config)) for query in queries]
        sides = [await _open(replicas) for replicas in opened]
        read_bytes = sum(side.reader.manifest.size_bytes for side in sides)
        with progress_bar("comparing", read_bytes) as progress:
            report = await _compare(sides[0], sides[1], tuple(only or ()), progress)
    print_report(report, as_json=json, text=lambda each: _print(each, everything=everything))
    return 0


def parse_checkpoint(text: str, run: str | None, *, tier: str = AUTO) -> CheckpointQuery:
    """`[RUN/]STEP[-gGENERATION]`, where STEP is a number, `latest` or `milestone:NAME`; also the form in which tierd
    prints a checkpoint. Raises BadConfig for anything else."""
    match = _CHECKPOINT.fullmatch(text)
    if match is None:
        raise BadConfig(
            f"{text!r} names no checkpoint", hint="as in 18000, RUN/18000, RUN/18000-g2, latest or milestone:NAME"
        )
    named, generation = match["run"], match["generation"]
    if None not in (run, named) and run != named:
        raise BadConfig(f"{text} is of run {named}, and --run is {run}", hint="leave --run out")
    return parse_query(
        named or run, match["step"], int(generation) if generation else None, tier=tier, allow_unhealthy=True
    )


def _replicas(query: CheckpointQuery, tiers: OpenedTiers, config: Config | None) -> Replicas:
    return Replicas(query, selectable_replicas(tiers.catalog), tiers.by_name, config)


class _Side:
    """One of the two checkpoints, with the headers of its shards."""

    def __init__(self, reader: VerifiedReader, shards: Mapping[str, Shard]) -> None:
        self.reader = reader
        self.shards = shards
        self.tensors = {tensor.name: tensor for tensor in whole_tensors(shards)}

    def parts(self) -> Iterator[tuple[WholeTensor, Part]]:
        """Each part of each tensor once, in the order of the files."""
        order = {name: number for number, name in enumerate(self.shards)}
        parts = [(tensor, part) for tensor in self.tensors.values() for part in tensor.parts]
        yield from sorted(parts, key=lambda each: (order[each[1].shard], each[1].entry.offset))

    def values(self, *, all_ranks: bool) -> dict[str, str]:
        """The leaves of the state tree of rank 0, as JSON by their path; with `all_ranks` also what other ranks have
        that differs from that."""
        metadata = sorted((shard.tierd for shard in self.shards.values()), key=lambda each: each.get("rank", 0))
        first, *others = metadata if all_ranks else metadata[:1]
        values = dict(_leaves("", first.get("state") or {}))
        own = {
            f"rank {other.get('rank')}: {path}": leaf
            for other in others
            for path, leaf in _leaves("", other.get("state") or {})
            if values.get(path) != leaf
        }
        return values | own


async def _open(replicas: Replicas) -> _Side:
    await replicas.nearest()
    if replicas.manifest.is_adopted:
        raise Unsupported(
            f"compare {replicas.chosen.id}: another program wrote it, and tierd does not read its files",
            hint="restore both with `tierd restore --to` and compare them with the tools of that program",
        )
    reader = VerifiedReader(replicas.manifest, replicas.nearest)
    return _Side(reader, {entry.name: await reader.shard(entry.name) for entry in replicas.manifest.files})


async def _compare(a: _Side, b: _Side, only: tuple[str, ...], progress: Progress) -> Difference:
    from tierd.cli.partial_restore import Subset
    from tierd.cli.tensor_numbers import Distance

    subset = Subset(only=only, rank=None)
    names_a, names_b = ({name for name in side.tensors if not only or subset.includes(name)} for side in (a, b))
    tensors = {name: _described(a.tensors[name], b.tensors[name]) for name in sorted(names_a & names_b)}
    distances = {name: Distance() for name, tensor in tensors.items() if not tensor.problem}
    for side in (a, b):
        side.reader.progress = progress
    block = bytearray(2 * BLOCK_BYTES)  # one for all: there may be millions of pairs of parts
    for tensor, part in a.parts():
        if tensor.name in distances:
            for other in b.tensors[tensor.name].parts:
                await _add_common(distances[tensor.name], a, b, part, other, memoryview(block))
    for name, distance in distances.items():
        _enter(tensors[name], distance)
    has_same_ranks = len(a.shards) == len(b.shards)
    values_a, values_b = (side.values(all_ranks=has_same_ranks) for side in (a, b))
    values = [
        ValueDifference(path=path, a=values_a.get(path), b=values_b.get(path))
        for path in sorted(values_a.keys() | values_b.keys())
        if values_a.get(path) != values_b.get(path)
    ]
    has_same_tensors = names_a == names_b and all(tensor.is_equal for tensor in tensors.values())
    return Difference(
        a=str(a.reader.manifest.id),
        b=str(b.reader.manifest.id),
        is_equal=has_same_tensors and not values,
        tensors=list(tensors.values()),
        only_a=sorted(names_a - names_b),
        only_b=sorted(names_b - names_a),
        values=values,
    )


def _described(a: WholeTensor, b: WholeTensor) -> TensorDifference:
    texts = [f"{_dtype(tensor)} {list(tensor.shape)}" for tensor in (a, b)]
    problem = "" if texts[0] == texts[1] else " and ".join(texts)
    return TensorDifference(name=a.name, dtype=_dtype(a), shape=list(a.shape), problem=problem)


def _dtype(tensor: WholeTensor) -> str:
    """The dtype, with torch's name if safetensors has no such dtype. Then the stored elements are compared."""
    torch_dtype = tensor.parts[0].entry.torch_dtype
    return f"{torch_dtype} as {tensor.dtype}" if torch_dtype else tensor.dtype


async def _add_common(distance: Distance, a: _Side, b: _Side, part: Part, other: Part, block: memoryview) -> None:
    """Adds what two parts of a tensor have in common. `block`: twice BLOCK_BYTES, to read into."""
    item_bytes = DTYPE_BYTES[part.entry.dtype]
    boxes = [(each.entry.saved_offsets, each.entry.shape) for each in (part, other)]
    for begin_a, begin_b, length in common_runs(boxes[0], boxes[1]):
        for done in range(0, length * item_bytes, BLOCK_BYTES):
            count = min(BLOCK_BYTES, length * item_bytes - done)
            first, second = block[:count], block[BLOCK_BYTES : BLOCK_BYTES + count]
            await a.reader.fill(part.shard, part.entry.offset + begin_a * item_bytes + done, first)
            await b.reader.fill(other.shard, other.entry.offset + begin_b * item_bytes + done, second)
            await asyncio.to_thread(distance.add, part.entry.dtype, first, second)


def _enter(tensor: TensorDifference, distance: Distance) -> None:
    for name in ("elements", "differing", "not_finite", "max_abs", "max_rel", "norm_a", "norm_b", "norm_difference"):
        setattr(tensor, name, getattr(distance, name))
    tensor.relative = tensor.norm_difference / tensor.norm_a if tensor.norm_a else None


def _leaves(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), each)
    elif isinstance(value, list) and value:
        for index, each in enumerate(value):
            yield from _leaves(f"{path}[{index}]", each)
    else:
        yield path, msgspec.json.encode(value).decode()


def _print(report: Difference, *, everything: bool) -> None:
    print_result(f"A  {report.a}", f"B  {report.b}", "")
    shown = [tensor for tensor in report.tensors if everything or not tensor.is_equal]
    rows = [
        [
            tensor.name,
            tensor.dtype,
            "x".join(map(str, tensor.shape)) or "scalar",
            *(
                [tensor.problem, "", "", "", "", ""]
                if tensor.problem
                else [
                    f"{tensor.differing} of {tensor.elements}",
                    *(f"{number:.3g}" for number in (tensor.max_abs, tensor.max_rel, tensor.norm_a, tensor.norm_b)),
                    "-" if tensor.relative is None else f"{tensor.relative:.3g}",
                ]
            ),
        ]
        for tensor in shown
    ]
    if rows:
        heads = ["TENSOR", "DTYPE", "SHAPE", "DIFFERING", "MAX ABS", "MAX REL", "NORM A", "NORM B", "NORM(B-A)/NORM A"]
        table(heads, rows, right=heads[3:])
        print_result("")
    for side, names in (("A", report.only_a), ("B", report.only_b)):
        for name in names:
            print_result(f"only in {side}: {name}")
    for value in report.values[:VALUES_SHOWN]:
        print_result(f"{value.path}: {_shortened(value.a)} → {_shortened(value.b)}")
    if len(report.values) > VALUES_SHOWN:
        print_result(f"and {len(report.values) - VALUES_SHOWN} more values; --json prints all")
    not_finite = sum(tensor.not_finite for tensor in report.tensors)
    counts = [
        f"{sum(tensor.is_equal for tensor in report.tensors)} of {len(report.tensors)} tensors are equal",
        *[f"{len(report.values)} other values differ"] * bool(report.values),
        *[f"{not_finite} elements are not finite"] * bool(not_finite),
    ]
    print_result("EQUAL: " * report.is_equal + ", ".join(counts))


def _shortened(value: str | None) -> str:
    if value is None:
        return "absent"
    return value if len(value) <= 60 else value[:57] + "..."
