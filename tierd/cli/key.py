"""`tierd key`: makes a key file, shows the ids of its keys, and signs the manifests and markers that exist already.

Signing takes the lock of the hot directory, because it replaces manifests: stop the daemon first. It lists the files,
asks, and signs exactly these. Every byte of a checkpoint is compared with its manifest before that is signed.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tierd.cli.console import print_note, print_result
from tierd.cli.log import record
from tierd.cli.opened_tiers import exit_code, open_tiers
from tierd.cli.options import settings_of
from tierd.config.sections import Config
from tierd.errors import BadConfig
from tierd.format import audit
from tierd.format.ids import Run, check_run
from tierd.format.signature import ED25519, HMAC, Keyring
from tierd.keys.key_file import keyring_of, make_key_file, read_key_file
from tierd.tiers.lock import Lock, LockHolder
from tierd.transfer.signing import Signing, UnsignedFile


class KeyAction(StrEnum):
    NEW = "new"
    SHOW = "show"
    PUBLIC = "public"
    SIGN = "sign"


async def key(
    context: typer.Context,
    action: Annotated[
        KeyAction, typer.Argument(help="new, show and public take the path of a key file, sign takes a run.")
    ],
    name: Annotated[str, typer.Argument(metavar="PATH|RUN", help="A key file, or the run whose checkpoints to sign.")],
    step: Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="sign: only this step.")] = None,
    ed25519: Annotated[
        bool, typer.Option("--ed25519", help="new: a key whose public part is for nodes that only restore.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="sign: print the files that would be signed, and sign nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="sign: sign what is shown, and do not ask.")] = False,
) -> int:
    """Make a key file, show the ids of its keys, print the public keys for nodes that only restore, or sign the
    checkpoints of a run that you trust. Stop the daemon before you sign."""
    _check_options(action, is_for_signing=dry_run or yes or step is not None, is_for_new=ed25519)
    if action is KeyAction.SIGN:
        return await _sign_run(context, check_run(name), step, is_dry_run=dry_run, is_confirmed=yes)
    path = Path(name)
    keys = (make_key_file(path, ED25519 if ed25519 else HMAC) if action is KeyAction.NEW else read_key_file(path)).keys
    if action is KeyAction.PUBLIC and not all(each.public_line for each in keys):
        raise BadConfig(
            f"print the public keys of {name}: a key in it is of {HMAC}, which has no public part",
            hint="`tierd key new --ed25519 PATH` makes a key with a public part",
        )
    for each in keys:
        print_result(each.public_line.rstrip() if action is KeyAction.PUBLIC else each.id)
    return 0


def _check_options(action: KeyAction, *, is_for_signing: bool, is_for_new: bool) -> None:
    """Raises BadConfig for an option that the action does not have: it would be ignored."""
    if is_for_signing and action is not KeyAction.SIGN:
        raise BadConfig(f"tierd key {action.value}: --step, --dry-run and --yes are options of `tierd key sign`")
    if is_for_new and action is not KeyAction.NEW:
        raise BadConfig(f"tierd key {action.value}: --ed25519 is an option of `tierd key new`")


async def _sign_run(context: typer.Context, run: Run, step: int | None, *, is_dry_run: bool, is_confirmed: bool) -> int:
    settings = settings_of(context)
    config = settings.config()
    keyring = keyring_of(config.security.key_file, to_sign=True)
    if keyring is None:
        raise BadConfig(
            f"sign {run}: the config names no key file",
            hint="`tierd key new PATH` makes one; set [security] key_file or $TIERD_KEY_FILE to it",
        )
    with Lock(config.hot_path, LockHolder(node=config.daemon.node)):
        async with open_tiers(settings, allow_unsigned=True) as tiers:
            code = tiers.check_reachable()
            known = {name: tier for name, tier in tiers.by_name.items() if tiers.catalog.tiers[name].is_known}
            refused = {(name, key): why for name in known for key, why in tiers.catalog.tiers[name].foreign.items()}
            signing = Signing(known, keyring, refused)
            planned = await signing.plan(run, step)
            for file in planned:
                print_result(f"{'would sign' if is_dry_run else 'to sign:'} {file}: {file.reason}")
            count = 0
            if planned and not is_dry_run:
                _confirm(run, len(planned), keyring, is_confirmed=is_confirmed)
                for file in planned:
                    count += await _sign(signing, file, config, keyring)
    for error in signing.errors.values():
        print_note(f"tierd: not signed: {error.message}")
    if is_dry_run:
        print_result(f"{len(planned)} files to sign with the key {keyring.signing_key.id}")
    else:
        print_result(f"{count} files signed with the key {keyring.signing_key.id}")
    return exit_code([*signing.errors.values()], of=len(signing.errors) + 1) or code


def _confirm(run: Run, count: int, keyring: Keyring, *, is_confirmed: bool) -> None:
    """Raises BadConfig unless a person, or `--yes`, says so."""
    question = f"Sign these {count} files with the key {keyring.signing_key.id}?"
    try:
        if is_confirmed or typer.confirm(question, err=True):
            return
    except typer.Abort:
        pass
    raise BadConfig(
        f"sign {run}: nobody has confirmed it, so nothing was signed",
        hint="answer y, or give --yes, to sign the files above",
    )


async def _sign(signing: Signing, file: UnsignedFile, config: Config, keyring: Keyring) -> bool:
    if not await signing.sign(file):
        return False
    if file.checkpoint is not None:
        reason = f"{file.key.rpartition('/')[2]} by the key {keyring.signing_key.id}"
        await record(config, audit.EventKind.SIGNED, file.checkpoint, file.tier, reason=reason)
    print_result(f"signed {file}")
    return True
