"""The header of a safetensors file that another program wrote: whole tensors, without tierd's metadata.

Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from tierd.errors import Corrupt, Unsupported
from tierd.format.shard import DTYPE_BYTES, Shard, header_length, no_duplicates, parse_entries

SHARDING = "DCP_SHARDING_INFO"  # in the metadata of files with parts of tensors


def read_plain_header(read: Callable[[int, int], bytes], file_bytes: int, *, where: str) -> Shard:
    """The tensors of a file; `tierd` is empty. `read`: returns (length, offset), as os.pread does.

    Raises Corrupt for any violation of the format, and Unsupported for a dtype that tierd does not store and for a
    shard of tierd itself."""
    length = header_length(read(8, 0), file_bytes, where=where)
    try:
        table = json.loads(read(length, 0)[8:], object_pairs_hook=no_duplicates)
        metadata = table.pop("__metadata__", {})
        if "tierd" in metadata:
            raise Unsupported(
                f"read {where}: it is a shard of a checkpoint of tierd",
                hint="`tierd export` writes whole tensors; `tierd fork` begins a new run from a checkpoint",
            )
        if SHARDING in metadata:
            raise Unsupported(
                f"read {where}: it has parts of tensors, and does not say how large the whole ones are",
                hint="HuggingFaceStorageWriter(…, enable_consolidation=True) of torch writes whole ones",
            )
        for name, entry in table.items():
            if entry["dtype"] not in DTYPE_BYTES:
                raise Unsupported(
                    f"read {where}: {name} has the dtype {str(entry['dtype'])[:40]}, which tierd does not store",
                    hint=f"tierd stores {', '.join(DTYPE_BYTES)}",
                )
        offsets = {name: [0] * len(entry["shape"]) for name, entry in table.items()}
        return Shard(parse_entries(table, length, file_bytes, offsets, {}), length, {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Corrupt(f"read the header of {where}: {error!r}", hint="was it copied whole?") from error
