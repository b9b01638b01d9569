"""The tests of attacks fail without the defence that they test.

Each row removes one defence from tierd's source, while it is imported, and names a test of an attack, which must then
fail by the assertion that the row names. The same tests must pass with all defences in place.

`item` is the subject: 1 forged checkpoints, 2 links and leftovers, 3 generations, 4 the daemon's identity, 5 private
files, 6 lock, listener and log, 7 exhaustion, 8 users, 9 coverage of tensors, 10 config, 11 names and text, "secret"
the secret of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.security import test_iam_policy
from tests.support.removed_defence import DEADLINE, ROOT, Edit, run_tests


def long(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.long(pytest.mark.timeout(900)(test))


@dataclass(frozen=True, slots=True)
class Removal:
    """`defence`: what is removed, by the edits. `test`: of the attack. `found`: a part of the error that it then ends
    with, which is the exception's name, a colon and its message."""

    item: str
    defence: str
    test: str
    found: str
    edits: tuple[Edit, ...]


def removed(item: str, defence: str, test: str, found: str, *edits: str) -> Removal:
    """`test`: as "bucket_writer::test_x" of tests/security, or with its path. `edits`: path, old, new, and so on."""
    name, _, function = test.partition("::")
    path = name if "/" in name or name.endswith(".py") else f"security/test_{name}.py"
    triples = zip(edits[::3], edits[1::3], edits[2::3], strict=True)
    return Removal(item, defence, f"tests/{path}::{function}", found, tuple(Edit(*triple) for triple in triples))


ACCESS, PEER, CACHE, TREE = "tierd/access.py", "tierd/peer.py", "tierd/tiers/cache.py", "tierd/tiers/tree.py"
ADMISSION, DOOR = "tierd/api/admission.py", "tierd/api/trainer.py"
SECRETS, SECRET = "tierd/api/run_secrets.py", "tierd/format/run_secret.py"
QUOTAS, HTTP, LISTING, CLAIMS = (
    "tierd/api/quotas.py",
    "tierd/api/http_server.py",
    "tierd/catalog/listing.py",
    "tierd/catalog/claims.py",
)
SIGNATURE, TIER, MEMORY = "tierd/format/signature.py", "tierd/tiers/tier.py", "tierd/memory/tier.py"
READABLE_TIER = "tierd/tiers/readable_tier.py"
OUTPUT, PARTIAL, LOCK = "tierd/transfer/atomic_output.py", "tierd/transfer/partial_file.py", "tierd/tiers/lock.py"
CONFIG_FILE, TEXT = "tierd/config/file.py", "tierd/format/text.py"

SIGNED = [
    removed(
        "1", "the signature of a manifest is checked",
        "bucket_writer::test_forged_newest_checkpoint_is_neither_restored_nor_counted",
        "AssertionError: assert 999999 == 2", READABLE_TIER,
        "            self.keyring.check(key, raw, where=self.name)\n        if name == layout.MANIFEST",
        "            pass\n        if name == layout.MANIFEST",
    ),
    removed(
        "1", "the signature of a tombstone is checked",
        "workers/test_committer.py::test_a_tombstone_that_is_not_signed_hides_no_checkpoint",
        "AssertionError: assert set() == ", TIER,
        "            if layout.is_marker(name):", "            if layout.is_marker(name) and name != layout.GONE:",
    ),
    removed(
        "1", "the key of a file is signed with it",
        "signatures::test_signed_manifest_is_foreign_at_another_step_and_in_another_run",
        "Failed: DID NOT RAISE Foreign", SIGNATURE, 'DOMAIN + name.encode() + b"\\n" + content', "DOMAIN + content",
    ),
    removed(
        "1", "a signature must fit the content", "signatures::test_manifest_moved_to_another_step_or_run_is_foreign",
        "AssertionError: assert set() == {'other/00000", SIGNATURE,
        'return not key.is_right(_message(name, unsigned), match["value"].decode())', "return False",
    ),
    removed(
        "1", "the digests of chunks are compared",
        "signatures::test_shard_changed_with_a_matching_crc_is_found_by_its_digest",
        "AssertionError: assert [] == [True]", "tierd/tiers/chunks.py",
        "    if has_digests and found.digest != expect.digest_of(index):\n", "    if False:\n",
    ),
    removed(
        "1", "the signature of a marker is checked when a tier is listed",
        "signatures::test_forged_marker_does_not_count_and_is_not_overwritten",
        "AssertionError: assert (frozenset({'best'}), None) == (frozenset(), None)", TIER,
        "            await self._leave_out_foreign_markers(listing, self.keyring, is_whole=is_whole)\n",
        "            pass\n",
    ),
    removed(
        "1", "the signature of a claim is checked when a tier is listed",
        "signatures::test_forged_claim_does_not_advance_the_generation", "AssertionError: assert 50 == 4", TIER,
        "            await self._leave_out_foreign_markers(listing, self.keyring, is_whole=is_whole)\n",
        "            [listing.add_generation(run, each) for run, all in listing.claims.items() for each in all]\n",
    ),
    removed(
        "1", "the signature of a claim is checked before it fences",
        "signatures::test_forged_claim_in_cold_fences_nobody_with_a_key", "AssertionError: assert 100 in []", TIER,
        "            self.keyring.check(key, raw, where=self.name)\n        return raw\n\n    def _signed",
        "            pass\n        return raw\n\n    def _signed",
    ),
    removed(
        "1", "a marker that exists is checked before it counts as written",
        "signatures::test_forged_marker_does_not_count_and_is_not_overwritten", "Failed: DID NOT RAISE Foreign", TIER,
        "        if self.keyring is not None and not is_new:\n", "        if False:\n",
    ),
    removed(
        "1", "the signature of a verdict is checked when it is copied",
        "signatures::test_verdict_that_was_replaced_after_its_listing_is_not_signed",
        "AssertionError: assert Diagnosis(healthy=True, examined_at='', tensors=1, not_finite=[], digest=",
        READABLE_TIER,
        "            self.keyring.check(key, raw, where=self.name)\n        return raw\n\n    def conflict",
        "            pass\n        return raw\n\n    def conflict",
    ),
    removed(
        "1", "a replica in cold is read again before hot evicts",
        "signatures::test_replica_with_a_forged_manifest_does_not_let_hot_evict",
        "AssertionError: assert [300] == [300, 200, 100]", "tierd/workers/reaper.py",
        "rests_on_others and not await self._is_elsewhere(action, failed_tiers)", "False",
    ),
    removed(
        "1", "without a key, what nobody claimed counts for no deletion",
        "signatures::test_without_a_key_what_no_daemon_of_the_run_wrote_pushes_out_nothing",
        "AssertionError: assert [] == ['cold', 'cold', 'cold']", CLAIMS,
        "        if self.are_signed:\n            return {}\n        doubts", "        return {}\n        doubts",
    ),
    removed(
        "1", "a newer foreign checkpoint in hot is refused by name",
        "bucket_writer::test_newer_unsigned_checkpoint_in_hot_is_refused_by_name",
        "AssertionError: assert (0, False) == (12, True)", "tierd/lifecycle/selection.py",
        "foreign_in_hot = [replica for replica in inventory.foreign if replica in unreadable and replica.tier == HOT]",
        "foreign_in_hot = []",
    ),
    removed(
        "1", "what is unsigned is restored only by its step",
        "bucket_writer::test_run_with_unsigned_checkpoints_is_refused_until_they_are_signed",
        "AssertionError: only by name", "tierd/cli/restore.py", "    if allow_unsigned and query.step is None:\n",
        "    if False:\n",
    ),
    removed(
        "1", "a daemon without a key does not start beside signed checkpoints",
        "bucket_writer::test_daemon_that_lost_its_key_does_not_start_beside_signed_checkpoints",
        "AssertionError: assert ' serves ' not in '", "tierd/daemon.py",
        "        await refuse_signed(context.hot)\n", "        pass\n",
    ),
    removed(
        "1", "a key file that others may read is refused", "signatures::test_key_file_that_others_may_read_is_refused",
        "Failed: DID NOT RAISE BadConfig", "tierd/keys/key_file.py", "not_allowed = 0o077 if", "not_allowed = 0o022 if",
    ),
    removed(
        "1", "the cache of manifests is checked with the keys",
        "tiers/test_cache.py::test_with_a_key_only_what_it_signed_is_returned", "AssertionError: assert {CheckpointId",
        CACHE, "                if keyring is not None:\n", "                if False:\n",
    ),
    removed(
        "1", "a newer generation is newer than a higher step",
        "replay::test_replayed_checkpoints_of_an_older_generation_are_not_newest_and_push_out_nothing",
        "where False = all", "tierd/format/ids.py", "return (self.generation, self.step)",
        "return (self.step, self.generation)",
    ),
    removed(
        "1", "a claim that was put back after its run had expired fences nobody",
        "replay::test_replayed_claim_of_a_run_that_had_expired_fences_nobody", "AssertionError: assert True is False",
        "tierd/workers/deferred_claim.py", " and not _was_put_back(context, other, claim):", ":",
    ),
    removed(
        "1", "a tier that was a place of its own keeps no daemon from starting",
        "bucket_writer::test_a_tier_that_is_named_as_another_one_keeps_no_daemon_from_starting",
        "AssertionError: assert ' serves ' in", "tierd/catalog/identity.py",
        "expected not in identities and (error :=", "(error :=",
    ),
    removed(
        "1", "no event of a key that was removed comes after those of a present one",
        "test_audit.py::test_after_a_key_was_removed_its_events_cannot_be_checked_and_the_chain_is_whole",
        "AssertionError: assert 'is not in the key file' in ''", "tierd/format/audit.py",
        "is_signed and not trusted and keyring", "is_signed and keyring",
    ),
    removed(
        "1", "a nested claim is not a claim", "reviewed_attacks::test_a_nested_claim_in_cold_stops_no_copies",
        "for the copy of this run", "tierd/format/claim.py", "except UNDECODABLE:",
        "except (msgspec.DecodeError, ValueError):",
    ),
    removed(
        "1", "a claim that cannot be read fences nobody",
        "reviewed_attacks::test_a_claim_that_cannot_be_read_stops_no_copies", "for the copy of this run", TIER,
        "            raise Foreign(raw.message, hint=raw.hint)\n", "            raise raw\n",
    ),
]  # fmt: skip

FOLDERS = [
    removed(
        "2", "a leftover folder of another user is refused",
        "links_and_leftovers::test_a_leftover_folder_of_another_user_is_not_adopted",
        "Failed: DID NOT RAISE TargetNotEmpty", OUTPUT, "if stat_result.st_uid != os.geteuid():", "if False:",
    ),
    removed(
        "2", "the leftover folder is opened without following a link",
        "links_and_leftovers::test_a_link_in_place_of_the_leftover_folder_is_not_followed",
        "FileNotFoundError: [Errno 2] No such file or directory: '", OUTPUT,
        "closing_fd(os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=output.above)) as descriptor",
        "closing_fd(os.open(name, FOLDER, dir_fd=output.above)) as descriptor", OUTPUT,
        "os.stat(name, dir_fd=output.above, follow_symlinks=False))", "os.stat(name, dir_fd=output.above))",
    ),
    removed(
        "2", "a leftover is cleared by descriptors, not by paths",
        "links_and_leftovers::test_a_leftover_that_is_swapped_for_a_link_while_it_is_cleared_leads_nowhere",
        "AssertionError: assert [] == [('x.", OUTPUT, "                os.unlink(name, dir_fd=descriptor)\n",
        '                os.unlink(os.path.join(os.readlink(f"/proc/self/fd/{partial}"), folder, name))\n',
    ),
    removed(
        "2", "a restore writes into the folder that was opened, not to its path",
        "links_and_leftovers::test_what_is_restored_after_a_swap_goes_into_the_folder_that_was_opened",
        "IsADirectoryError: [Errno 21] Is a directory: '", OUTPUT, 'return Path(f"/proc/self/fd/{self.descriptor}")',
        "return self.partial",
    ),
    removed(
        "2", "files of an attempt in a folder that others can write are not kept",
        "links_and_leftovers::test_files_of_an_earlier_attempt_are_kept_only_if_nobody_else_could_write_them",
        "AssertionError: assert True is False", OUTPUT, "            keep = ()  # nothing",
        "            pass  # nothing",
    ),
    removed(
        "2", "folders above the target are opened without following links",
        "links_and_leftovers::test_a_new_folder_above_a_target_that_is_swapped_for_a_link_leads_nowhere",
        "Failed: DID NOT RAISE TierdError", OUTPUT, "opened = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=opened)",
        "opened = os.open(name, FOLDER, dir_fd=opened)",
    ),
    removed(
        "2", "a tier is swept by descriptors, not by paths",
        "links_and_leftovers::test_a_folder_that_is_swapped_for_a_link_while_a_tier_is_swept_leads_nowhere",
        "AssertionError: assert [] == [('x.", "tierd/tiers/directory.py",
        "                os.unlink(entry.name, dir_fd=folder)\n", "                os.unlink(self.root / key)\n",
    ),
    removed(
        "2", "a partial file of another user is not swept",
        "links_and_leftovers::test_a_partial_file_of_another_user_is_not_swept", "AssertionError: assert 1 == 0",
        "tierd/tiers/new_file.py", "        if os.fstat(fd).st_uid not in (os.geteuid(), os.fstat(folder).st_uid):\n",
        "        if False:\n",
    ),
    removed(
        "2", "a download of another user is not continued",
        "links_and_leftovers::test_an_unfinished_download_is_continued_only_if_nobody_else_can_change_it",
        "AssertionError: its content was taken over", ACCESS,
        "return is_single and stat_result.st_uid == os.geteuid() and not others_can_write(stat_result)",
        "return is_single and not others_can_write(stat_result)",
    ),
    removed(
        "2", "a download that others can write is not continued",
        "links_and_leftovers::test_an_unfinished_download_is_continued_only_if_nobody_else_can_change_it",
        "AssertionError: its content was taken over", ACCESS,
        "return is_single and stat_result.st_uid == os.geteuid() and not others_can_write(stat_result)",
        "return is_single and stat_result.st_uid == os.geteuid()",
    ),
    removed(
        "2", "a download with a second name is not continued",
        "links_and_leftovers::test_an_unfinished_download_is_continued_only_if_nobody_else_can_change_it",
        "AssertionError: its content was taken over", ACCESS,
        "stat.S_ISREG(stat_result.st_mode) and stat_result.st_nlink == 1",
        "stat.S_ISREG(stat_result.st_mode)",
    ),
    removed(
        "2", "a link in place of a download is not followed",
        "links_and_leftovers::test_an_unfinished_download_is_continued_only_if_nobody_else_can_change_it",
        "AssertionError: its content was taken over", TREE,
        "fd = os.open(name, os.O_RDWR | os.O_NONBLOCK | NO_LINK, dir_fd=folder)",
        "fd = os.open(name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)",
    ),
    removed(
        "2", "a download is the file that was begun",
        "links_and_leftovers::test_a_download_that_is_swapped_for_another_file_is_not_published",
        "Failed: DID NOT RAISE TierUnreachable", PARTIAL,
        "if self._inode not in (None, (stat_result.st_dev, stat_result.st_ino)):", "if False:",
    ),
    removed(
        "2", "a cache in a folder of another user is not written",
        "links_and_leftovers::test_a_cache_of_manifests_in_a_folder_of_another_user_is_not_used",
        "AssertionError: assert [PosixPath('/", CACHE,
        "            if not await asyncio.to_thread(is_own_folder, self._folder):\n                return\n", "",
    ),
    removed(
        "2", "a cache in a folder of another user is not read",
        "links_and_leftovers::test_a_cache_of_manifests_in_a_folder_of_another_user_is_not_used",
        "AssertionError: assert {CheckpointId", CACHE,
        "            if not await asyncio.to_thread(is_own_folder, self._folder):\n                return {}\n", "",
    ),
    removed(
        "2", "folders of a tier are opened without following links",
        "tiers/test_directory.py::test_no_link_leads_out_of_the_root", "Failed: DID NOT RAISE BadRequest", TREE,
        "below = os.open(parent, FOLDER | os.O_NOFOLLOW, dir_fd=folder)",
        "below = os.open(parent, FOLDER, dir_fd=folder)",
    ),
    removed(
        "2", "files of a tier are opened without following links",
        "tiers/test_directory.py::test_no_link_leads_out_of_the_root", "Failed: DID NOT RAISE BadRequest", TREE,
        "fd = os.open(name, flags | os.O_NONBLOCK | NO_LINK, dir_fd=folder)",
        "fd = os.open(name, flags | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)",
    ),
    removed(
        "2", "a walk opens folders without following links",
        "links_and_leftovers::test_a_folder_that_is_swapped_for_a_link_before_it_is_listed_leads_nowhere",
        "AssertionError: assert 1 == 0", TREE, "below = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=folder)",
        "below = os.open(name, FOLDER, dir_fd=folder)",
    ),
    removed(
        "2", "a folder that was swapped in does not get the mode of an adopted one",
        "transfer/test_adopted_output.py::"
        "test_a_folder_that_is_swapped_after_it_was_published_gives_no_other_folder_its_mode",
        "Failed: DID NOT RAISE OSError", "tierd/transfer/adopted_output.py",
        "if not os.path.samestat(os.fstat(folder), built):", "if False:",
    ),
]  # fmt: skip

GENERATIONS = [
    removed(
        "3", "a user starts a run at a limited rate",
        "trainer_limits::test_generations_cannot_be_used_up_by_starting_a_run_again_and_again",
        "AssertionError: assert False", QUOTAS, "        if not rate.try_spend():\n            raise Full(",
        "        if False:\n            raise Full(",
    ),
    removed(
        "3", "jumps of generations do not add up", "test_claims.py::test_jumps_of_a_thousand_do_not_add_up",
        "AssertionError: assert 3000", CLAIMS, "return 1 + min(seen, generation_limit(0, now_s))", "return 1 + seen",
    ),
    removed(
        "3", "a generation that no start can have reached is foreign",
        "signatures::test_forged_generation_is_foreign_and_leaves_numbers_to_claim",
        "AssertionError: assert 99999999 == 1", LISTING,
        "GENERATION_SEEN_MAX if is_trusted else claims.generation_limit(run, now_s) for run", "10**8 for run",
    ),
    removed(
        "3", "the generation that a trainer names is bounded",
        "bucket_writer::test_hello_with_a_forged_generation_does_not_brick_the_run",
        "AssertionError: the daemon took the generation", ADMISSION, "if not 1 <= generation <= limit:", "if False:",
    ),
    removed(
        "3", "a trainer may name one generation more than was claimed",
        "reviewed_attacks::test_a_peer_that_names_a_generation_that_nobody_claimed_is_refused", "<= 20", CLAIMS,
        "return newest + 1 if self._claimed_here.get(run) else max", "return max",
    ),
    removed(
        "3", "numbers in the names of files are not tried one by one",
        "test_claims.py::test_forged_claims_do_not_block_a_start", "TierUnreachable: claim a generation of", CLAIMS,
        "names = frozenset[int]().union(*self._named_generations.get(run, {}).values())", "names = frozenset[int]()",
    ),
    removed(
        "3", "no number is claimed that no listing would believe",
        "reviewed_attacks::test_a_run_whose_generations_are_used_up_does_not_start_and_keeps_its_checkpoints",
        "Failed: DID NOT RAISE TierUnreachable", ADMISSION, "            if number > GENERATION_SEEN_MAX:  # no",
        "            if False:  # no",
    ),
    removed(
        "3", "a forged name beyond the limit uses up no numbers",
        "test_claims.py::test_a_forged_claim_of_a_high_generation_uses_up_no_numbers",
        "AssertionError: assert 90000000 == 1", CLAIMS, "for name in names if name < limit", "for name in names",
    ),
]  # fmt: skip

IDENTITY = [
    removed(
        "4", "a client checks the user of the process that listens",
        "daemon_identity::test_a_daemon_of_another_user_gets_not_even_a_greeting",
        "DaemonUnreachable: greet the daemon at", PEER, "if (uid := peer_of(connecting).uid) not in expected:",
        "if False:",
    ),
    removed(
        "4", "a client checks it again when it reconnects",
        "daemon_identity::test_a_daemon_of_another_user_that_takes_the_place_of_a_dead_one_gets_no_snapshot",
        "AssertionError: waited 12 s for the session to try the new socket", PEER,
        "if (uid := peer_of(connecting).uid) not in expected:", "if False:",
    ),
    removed(
        "4", "the directory of a socket must not be another user's",
        "daemon_identity::test_a_socket_in_a_directory_of_another_user_is_refused",
        "AssertionError: Regex pattern did not match.", PEER, "    if folder.st_uid not in expected:\n",
        "    if False:\n",
    ),
    removed(
        "4", "the owner of a socket in a sticky directory is checked",
        "daemon_identity::test_in_a_sticky_directory_the_owner_of_the_socket_decides",
        "AssertionError: Regex pattern did not match.", PEER, "        if owner not in expected:\n",
        "        if False:\n",
    ),
    removed(
        "4", "a directory in which others can replace the socket is refused",
        "daemon_identity::test_a_directory_where_others_can_replace_the_socket_is_refused",
        "DaemonUnreachable: greet the daemon at", PEER, "        if not folder.st_mode & stat.S_ISVTX:\n",
        "        if False:\n",
    ),
    removed(
        "4", "memory is handed out by descriptors that can only read",
        "daemon_identity::test_descriptors_that_are_handed_out_to_read_cannot_be_written",
        "AssertionError: assert (32770 & 3) == 0", "tierd/descriptors.py",
        'return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)', "return os.dup(fd)",
    ),
    removed(
        "4", "files of hot are handed out by descriptors that can only read",
        "daemon_identity::test_descriptors_that_are_handed_out_to_read_cannot_be_written",
        "AssertionError: assert (165890 & 3) == 0", "tierd/tiers/directory.py",
        '        with translated(f"open {check_key(key)} in {self.url}"):\n            return '
        "self.tree.open_file(key)", "        if True:\n            return self.tree.open_file(key, os.O_RDWR)",
    ),
    removed(
        "4", "the manifest that is handed out is sealed",
        "daemon_identity::test_descriptors_that_are_handed_out_to_read_cannot_be_written",
        "Failed: DID NOT RAISE OSError", "tierd/descriptors.py",
        "        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _ALL_SEALS)\n", "",
    ),
    removed(
        "4", "the memory of a slot is writable for its user alone",
        "daemon_identity::test_memory_of_a_slot_can_be_opened_to_write_by_its_user_alone",
        "AssertionError: assert (33206 & 511) == 420", "client/tierd_client/slots/slot.py", "0o644", "0o666",
    ),
]  # fmt: skip

PRIVATE = [
    removed(
        "5", "folders are private", "private_files::test_everything_is_private_to_the_user_whatever_the_umask",
        "AssertionError: assert {'new': '0755", ACCESS, "return 0o700 if self.group is None",
        "return 0o755 if self.group is None",
    ),
    removed(
        "5", "files are private", "private_files::test_everything_is_private_to_the_user_whatever_the_umask",
        "AssertionError: assert {'new': '0700", ACCESS, "return 0o600 if self.group is None",
        "return 0o644 if self.group is None",
    ),
    removed(
        "5", "files are private: read by another user",
        "private_files::test_another_user_can_neither_read_a_checkpoint_nor_hold_the_lock",
        "Failed: DID NOT RAISE PermissionError", ACCESS, "return 0o600 if self.group is None",
        "return 0o644 if self.group is None", ACCESS, "return 0o700 if self.group is None",
        "return 0o755 if self.group is None",
    ),
    removed(
        "5", "the socket is private", "private_files::test_everything_is_private_to_the_user_whatever_the_umask",
        "AssertionError: assert {'new': '0700", "tierd/api/packets.py", "former = os.umask(0o177)",
        "former = os.umask(0)",
    ),
    removed(
        "5", "the group gets its rights whatever the umask",
        "private_files::test_a_group_may_read_everything_but_the_lock", "AssertionError: assert 438 == 416", ACCESS,
        "            os.fchmod(fd, self.folder_mode if stat", "            (self.folder_mode if stat",
    ),
    removed(
        "6", "the lock is private", "private_files::test_a_group_may_read_everything_but_the_lock",
        "AssertionError: who can open the lock for reading can hold it", LOCK,
        "os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)\n            self._keep_others_out(root)",
        "os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)",
    ),
    removed(
        "6", "a lock that was open to others is closed",
        "private_files::test_another_user_can_neither_read_a_checkpoint_nor_hold_the_lock",
        "Failed: DID NOT RAISE OSError", LOCK, "            os.fchmod(self._fd, 0o600)\n", "            pass\n",
    ),
    removed(
        "6", "the lock file of another user is refused",
        "private_files::test_a_lock_file_of_another_user_is_refused_by_name", "Failed: DID NOT RAISE Exception", LOCK,
        "if stat_result.st_uid not in (os.geteuid(), root.stat().st_uid):", "if False:",
    ),
]  # fmt: skip

LISTENER = [
    removed(
        "6", "HTTP connections are counted", "http_listener::test_half_open_connections_keep_no_client_out",
        "AssertionError: assert False", HTTP, "        if len(self.others) >= self.count_max:\n",
        "        if False:\n",
    ),
    removed(
        "6", "HTTP connections leave descriptors to the trainers",
        "http_listener::test_half_open_connections_leave_the_descriptors_to_the_trainers",
        "for connections to be ended", HTTP, "        if len(self.others) >= self.count_max:\n", "        if False:\n",
    ),
    removed(
        "6", "connections in a TLS handshake are counted",
        "reviewed_attacks::test_half_open_tls_connections_leave_the_descriptors_to_the_trainers",
        "for connections to be ended", HTTP, "        self.count(transport)\n        self._task",
        "        self.transport = transport\n        self._task",
    ),
    removed(
        "6", "a request has a limited time", "http_listener::test_a_request_has_a_limited_time_and_size",
        "AssertionError: assert False", HTTP, "call_later(REQUEST_TIMEOUT_S, self._check_progress)",
        "call_later(3600.0, self._check_progress)",
    ),
    removed(
        "6", "a client that reads nothing is dropped",
        "http_listener::test_a_client_that_reads_a_long_answer_slowly_gets_it_and_one_that_stops_is_dropped",
        "< 33554432", HTTP, "        if 0 < unsent_bytes < self._unsent_bytes:\n", "        if 0 < unsent_bytes:\n",
    ),
    removed(
        "6", "the lines of one statement are limited",
        "http_listener::test_lines_of_one_statement_are_limited_and_those_left_out_are_counted",
        "AssertionError: assert 1000 == 100", "tierd/status/log_limit.py", "        return lines.count <= LINES_MAX\n",
        "        return True\n",
    ),
    removed(
        "6", "a peer does not choose what is counted apart",
        "http_listener::test_a_peer_cannot_choose_what_is_counted_apart", "AssertionError: assert 200 == 100",
        "tierd/status/log_limit.py", "isinstance(first, str) and first in self._kinds", "isinstance(first, str)",
    ),
    removed(
        "6", "the log of half-open connections is bounded",
        "http_listener::test_half_open_connections_leave_the_descriptors_to_the_trainers", "<= 100",
        "tierd/status/log_limit.py", "        return lines.count <= LINES_MAX\n", "        return True\n",
    ),
    removed(
        "6", "metrics need the token", "http_listener::test_with_a_token_only_probes_are_answered_without_it",
        "AssertionError: assert 200 == 401", HTTP, "and not self._has_token(request):", "and False:",
    ),
    removed(
        "11", "a request must name this machine",
        "http_listener::test_a_page_that_points_its_name_at_the_daemon_reads_nothing",
        "AssertionError: assert 200 == 421", HTTP, 'if not is_named(request.headers.get("Host", ""), self._hosts):',
        "if False:",
    ),
    removed(
        "11", "names that are no address are compared",
        "http_listener::test_only_the_names_of_this_machine_are_answered", "AssertionError: assert True is False",
        HTTP, "    except ValueError:\n        return False\n    return True\n",
        "    except ValueError:\n        pass\n    return True\n",
    ),
]  # fmt: skip

LIMITS = [
    removed(
        "7", "manifests of all tiers together are bounded",
        "manifest_bounds::test_manifests_in_another_tier_count_and_replicas_of_them_do_not",
        "AssertionError: assert [] == ['other']", LISTING,
        "if self._total_bytes + added_bytes > self._tier.limits.manifests_mib_max << 20:", "if False:",
    ),
    removed(
        "7", "small manifests come first",
        "manifest_bounds::test_large_manifests_displace_no_small_one_from_the_memory_of_all",
        "AssertionError: assert {", LISTING,
        "    unread.sort(key=lambda checkpoint: listing.fingerprints[checkpoint][0])\n",
        "    unread.sort(key=lambda checkpoint: -listing.fingerprints[checkpoint][0])\n",
    ),
    removed(
        "7", "one manifest is bounded",
        "manifest_bounds::test_a_manifest_above_the_limit_is_one_unreadable_checkpoint_with_the_key_that_says_so",
        "AssertionError: assert 'forged/", LISTING, "        if size_bytes > self._tier.manifest_bytes_max:\n",
        "        if False:\n",
    ),
    removed(
        "7", "a manifest is read up to its size in the listing",
        "manifest_bounds::test_a_manifest_that_is_replaced_by_a_larger_one_after_its_listing_is_not_read",
        "where False = isinstance", TIER,
        "size_max = self.manifest_bytes_max if size_max is None else min(size_max, self.manifest_bytes_max)",
        "size_max = self.manifest_bytes_max",
    ),
    removed(
        "7", "large manifests are checked in a thread",
        "manifest_bounds::test_the_event_loop_goes_on_while_a_large_manifest_is_checked", "> 20", READABLE_TIER,
        "<= DECODED_AT_ONCE_BYTES:", ">= 0:",
    ),
    removed(
        "7", "a manifest that is too large is not committed",
        "manifest_bounds::test_a_checkpoint_with_a_manifest_above_the_limit_is_not_committed",
        "Failed: DID NOT RAISE Unsupported", TIER, "        if len(content) > self.manifest_bytes_max:\n",
        "        if False:\n",
    ),
    removed(
        "7", "what nobody signed takes no memory from what is signed",
        "manifest_bounds::test_manifests_that_nobody_signed_halt_nothing_and_take_no_memory_from_signed_ones",
        "AssertionError: assert 4 == 11", LISTING, "    if tier.keyring is None:\n        refused = {",
        "    if True:\n        refused = {",
    ),
    removed(
        "7", "the sizes of files are checked before space is reserved",
        "manifest_bounds::test_a_shard_that_is_smaller_than_its_manifest_says_reserves_no_space",
        "AssertionError: assert 'is missing or has another size' in 'read", "tierd/workers/fetcher.py",
        "        await check_sizes(manifest, cold)\n", "",
    ),
    removed(
        "7", "a slot that was never written cannot be sealed", "trainer_limits::test_a_sparse_slot_cannot_be_sealed",
        "where False = is_dropped", MEMORY, "        if not slot.is_allocated(sealed.size_bytes):\n",
        "        if False:\n",
    ),
    removed(
        "7", "the log lines of a peer are limited", "trainer_limits::test_reports_without_end_write_a_bounded_log",
        "30 MB were sent", "tierd/api/session.py", "        if self._lines is None or self._lines.try_spend():\n",
        "        if True:\n",
    ),
    removed(
        "7", "the text of a report is cut", "trainer_limits::test_reports_without_end_write_a_bounded_log",
        "30 MB were sent", DOOR, "printable(report.detail, DETAIL_CHARS_MAX)", "report.detail", "tierd/logs.py",
        "EVENT_CHARS_MAX = 8192", "EVENT_CHARS_MAX = 10**6",
    ),
    removed(
        "7", "the text of a loss is cut",
        "trainer_limits::test_losses_without_end_write_a_bounded_log_and_send_bounded_text",
        "AssertionError: assert ((20000 + 20008) + 20000) < 10000", DOOR,
        "message, hint, kind = printable(lost.message), printable(lost.hint), printable(lost.kind, KIND_CHARS_MAX)",
        "message, hint, kind = lost.message, lost.hint, lost.kind",
    ),
    removed(
        "7", "the log of refused connections is limited",
        "trainer_limits::test_connections_that_are_refused_without_end_write_a_bounded_log",
        "AssertionError: assert 200 < 100", DOOR, "        if self._quotas.may_record_refusal(connection.peer_uid):\n",
        "        if True:\n", "tierd/status/log_limit.py", "        return lines.count <= LINES_MAX\n",
        "        return True\n",
    ),
    removed(
        "7", "the number of slots of a user is limited",
        "trainer_limits::test_slots_beyond_the_quota_of_the_user_are_refused", "where False = is_dropped", QUOTAS,
        "        if len(capacities) >= self._limits.slots_max:\n", "        if False:\n",
    ),
    removed(
        "7", "the memory of a user's slots is limited",
        "trainer_limits::test_slots_beyond_the_quota_of_the_user_are_refused", "where False = is_dropped", QUOTAS,
        "        if sum(capacities) + capacity_bytes > size_max:\n", "        if False:\n",
    ),
    removed(
        "7", "runs without a checkpoint are limited for each user",
        "trainer_limits::test_runs_without_a_checkpoint_are_bounded_for_each_user", "where False = is_dropped",
        ADMISSION, "        self._quotas.check_run(connection.peer_uid, run)\n", "",
    ),
    removed(
        "7", "a run without a checkpoint expires",
        "workers/test_run_expirer.py::test_a_run_without_a_checkpoint_expires_in_every_tier",
        "AssertionError: assert 2 == 0", "tierd/workers/run_expirer.py",
        "                await self._context.tiers[name].store.delete(keys or [])\n", "                pass\n",
    ),
    removed(
        "7", "runs with series of their own are limited",
        "trainer_limits::test_many_runs_have_a_bounded_number_of_series", "AssertionError: assert 120 <= (100 + 1)",
        "tierd/api/gauges.py", "is_live, reports), key=age)[:RUNS_MAX]", "is_live, reports), key=age)",
    ),
    removed(
        "7", "a tier that a peer names is no label", "trainer_limits::test_many_runs_have_a_bounded_number_of_series",
        "AssertionError: assert {'hot', 'memory', 't'} <= {'hot', 'memory', 'other'}", DOOR,
        'tier = report.tier if report.tier in (*self._catalog.tiers, MEMORY) else "other"', "tier = report.tier",
    ),
    removed(
        "7", "a peer that sends too fast is read later",
        "trainer_limits::test_a_peer_that_sends_faster_than_its_rate_is_read_later", "AssertionError: assert [",
        QUOTAS, "        return max(0.0, -self._left / self._per_s)\n", "        return 0.0\n",
    ),
    removed(
        "7", "the daemon waits before it reads the next message",
        "trainer_limits::test_the_messages_of_one_connection_are_read_at_its_rate", "> 0.8", DOOR,
        "            await asyncio.sleep(rate.spend())", "            await asyncio.sleep(0)",
    ),
    removed(
        "7", "the daemon waits before it reads from a new connection",
        "trainer_limits::test_the_connections_of_one_user_are_read_at_its_rate", "AssertionError: assert (", DOOR,
        "            await asyncio.sleep(self._quotas.connection_wait_s(connection.peer_uid))\n", "",
    ),
    removed(
        "7", "connections to the trainers' socket are limited",
        "api/test_connections.py::test_a_thousand_idle_connections_delay_no_trainer_and_one_too_many_is_refused",
        "where False = is_dropped", DOOR,
        "            if self._connections >= self._context.config.limits.connections_max:\n",
        "            if False:\n",
    ),
]  # fmt: skip

USERS = [
    removed(
        "8", "the daemon refuses users outside of the group",
        "trainer_user::test_a_user_outside_the_group_cannot_connect",
        "AssertionError: assert 'it runs as uid 65523' in 'wait for Hello: the peer sent nothing'", ADMISSION,
        "        if not self._may_connect(connection):\n", "        if False:\n",
    ),
    removed(
        "8", "the socket is for the group alone", "trainer_user::test_a_user_outside_the_group_cannot_connect",
        "AssertionError: assert 438 == 432", ACCESS, 'os.chmod(f"/proc/self/fd/{fd}", 0o660)',
        'os.chmod(f"/proc/self/fd/{fd}", 0o666)',
    ),
    removed(
        "8", "a trainer of another user cannot open hot",
        "trainer_user::test_a_trainer_of_another_user_cannot_open_hot_or_the_credentials",
        "Failed: DID NOT RAISE PermissionError", ACCESS, "return 0o700 if self.group is None",
        "return 0o755 if self.group is None",
    ),
    removed(
        "8", "a trainer of another user gets descriptors that can only read",
        "trainer_user::test_descriptors_of_hot_are_read_only_for_a_trainer_of_another_user",
        "AssertionError: assert ['written', '", "tierd/tiers/directory.py",
        '        with translated(f"open {check_key(key)} in {self.url}"):\n            return '
        "self.tree.open_file(key)", "        if True:\n            return self.tree.open_file(key, os.O_RDWR)",
    ),
]  # fmt: skip

COVERAGE = [
    removed(
        "9", "an export proves by boxes that a tensor is whole",
        "coverage::test_export_of_parts_that_overlap_is_exit_12_and_writes_nothing", "AssertionError: assert 0 == 12",
        "tierd/format/whole.py", "    if problem := cover_problem(boxes, shape):\n", "    if problem := '':\n",
    ),
    removed(
        "9", "boxes are compared, not counts of elements",
        "coverage::test_export_of_parts_that_overlap_is_exit_12_and_writes_nothing", "AssertionError: assert 0 == 12",
        "tierd/format/boxes.py",
        "is_exact = count == expected and (not expected or _is_exact(distinct, shape, 0, [VISITS_MAX]))",
        "is_exact = count == expected",
    ),
    removed(
        "9", "a restore proves by boxes that a tensor is whole",
        "coverage::test_restore_of_parts_that_overlap_is_a_mismatch_and_changes_nothing",
        "Failed: DID NOT RAISE Mismatch", "client/tierd_client/state/restore_plan.py",
        "        if problem := self._cover_problems[name]:\n", "        if problem := '':\n",
    ),
    removed(
        "9", "reading as DCP proves by boxes that a tensor is whole",
        "coverage::test_dcp_reads_nothing_from_parts_that_overlap", "Failed: DID NOT RAISE Corrupt",
        "client/tierd_client/frameworks/dcp_contents.py",
        "        if problem := cover_problem(boxes, spanned_shape(boxes)):\n", "        if problem := '':\n",
    ),
]  # fmt: skip

CONFIG = [
    removed(
        "10", "the config of another user is refused",
        "config_owner::test_a_config_of_another_user_is_refused_by_name", "Failed: DID NOT RAISE BadConfig",
        CONFIG_FILE, "        if stat_result.st_uid not in (0, os.geteuid()):\n", "        if False:\n",
    ),
    removed(
        "10", "a config that others can write is refused",
        "config_owner::test_a_config_that_others_can_write_is_refused_by_name", "Failed: DID NOT RAISE BadConfig",
        CONFIG_FILE, "        if others_can_write(stat_result):\n", "        if False:\n",
    ),
    removed(
        "10", "credentials cross no network in the clear",
        "config_owner::test_plain_http_to_another_machine_has_to_be_allowed_by_name",
        "Failed: DID NOT RAISE BadConfig", CONFIG_FILE,
        "elif is_exposed_endpoint(cold.endpoint_url) and not cold.allow_plain_http:", "elif False:",
    ),
    removed(
        "10", "an endpoint of the environment is held to the same rule",
        "config_owner::test_an_endpoint_of_the_environment_is_held_to_the_same_rule", "NotFound: look: no such object",
        "tierd/s3/client.py", "if is_exposed_endpoint(endpoint_url) and not self._allows_plain_http:", "if False:",
    ),
    removed(
        "11", "text from outside is made printable",
        "foreign_text::test_no_text_from_outside_reaches_a_log_a_terminal_or_a_page_as_it_is", "AssertionError: /",
        TEXT, "    if text.isprintable():\n        return text\n    shown", "    return text\n    shown",
    ),
    removed(
        "11", "the log is made printable", "foreign_text::test_an_event_is_one_line_and_a_traceback_is_indented",
        "AssertionError: assert False", "tierd/logs.py",
        "lines = [printable(self.formatMessage(record), EVENT_CHARS_MAX)]", "lines = [self.formatMessage(record)]",
    ),
    removed(
        "11", "JSON is made printable",
        "foreign_text::test_no_text_from_outside_reaches_a_log_a_terminal_or_a_page_as_it_is",
        "AssertionError: /api/v1/status", TEXT, "return _NOT_PRINTABLE.sub(escape, decoded)",
        "return decoded",
    ),
    removed(
        "11", "the status page escapes HTML",
        "foreign_text::test_no_text_from_outside_reaches_a_log_a_terminal_or_a_page_as_it_is", "AssertionError: /",
        "tierd/web/pages.py", "autoescape=True", "autoescape=False",
    ),
    removed(
        "11", "the status page is made printable",
        "foreign_text::test_no_text_from_outside_reaches_a_log_a_terminal_or_a_page_as_it_is", "AssertionError: /",
        "tierd/web/pages.py", "return printable(value) if isinstance(value, str) else value", "return value",
    ),
]  # fmt: skip

SECRET_ROWS = [
    removed(
        "secret", "a peer that is not a trainer proves the secret before its Welcome",
        "run_secret::test_a_reader_without_the_secret_gets_no_welcome", "where False = is_dropped", ADMISSION,
        "            self.secrets.check(session)\n            self._peers.add(session)",
        "            self._peers.add(session)",
    ),
    removed(
        "secret", "each message is checked", "messages_without_secret::test_no_message_is_served_without_the_secret",
        "where False = is_dropped", DOOR, "                self.admission.secrets.check(session)  # the",
        "                pass  # the",
    ),
    removed(
        "secret", "a request to stop, to take a snapshot or to read memory is checked",
        "run_secret::test_another_job_neither_stops_a_run_nor_takes_snapshots_nor_reads_its_memory",
        "Transient: request stop of", ADMISSION,
        "            self.secrets.check(session)\n            self._peers.add(session)",
        "            self._peers.add(session)", DOOR, "                self.admission.secrets.check(session)  # the",
        "                pass  # the",
    ),
    removed(
        "secret", "a trainer is checked before a listing begins",
        "messages_without_secret::test_a_trainer_without_the_secret_causes_no_listing",
        "AssertionError: assert 1 == 0", ADMISSION,
        "        self.secrets.check_proof(run, hello.proof)\n        node = hello", "        node = hello",
    ),
    removed(
        "secret", "a trainer is checked before it claims a generation",
        "run_secret::test_another_job_claims_no_generation", "AssertionError: assert ['generation-", ADMISSION,
        "        self.secrets.check_proof(run, hello.proof)\n        node = hello", "        node = hello", ADMISSION,
        "            self.secrets.check_proof(run, hello.proof)  # again", "            pass  # again",
    ),
    removed(
        "secret", "a trainer is checked again after it has waited to claim",
        "messages_without_secret::test_a_start_that_waited_while_another_was_bound_claims_no_generation",
        "AssertionError: assert 2 == 1", ADMISSION, "            self.secrets.check_proof(run, hello.proof)  # again",
        "            pass  # again",
    ),
    removed(
        "secret", "a trainer is checked again when it is accepted",
        "messages_without_secret::test_a_start_that_claims_while_another_trainer_binds_the_run_is_refused",
        "AssertionError: assert 'welcome' == 'wrong_secret'", ADMISSION,
        "        self.secrets.check(session)  # again", "        pass  # again",
    ),
    removed(
        "secret", "a trainer that joins is checked",
        "run_secret::test_another_job_neither_joins_a_run_nor_fences_its_trainer", "where False = is_dropped",
        ADMISSION, "        self.secrets.check_proof(run, hello.proof)\n        node = hello", "        node = hello",
        ADMISSION, "            self.secrets.check_proof(run, hello.proof)  # again", "            pass  # again",
        ADMISSION, "        self.secrets.check(session)  # again", "        pass  # again",
    ),
    removed(
        "secret", "a trainer is checked before it gets slots",
        "run_secret::test_another_job_gets_no_slot_of_a_dead_trainer", "where False = is_dropped", ADMISSION,
        "        self.secrets.check_proof(run, hello.proof)\n        node = hello", "        node = hello", ADMISSION,
        "            self.secrets.check_proof(run, hello.proof)  # again", "            pass  # again", ADMISSION,
        "        self.secrets.check(session)  # again", "        pass  # again",
    ),
    removed(
        "secret", "a trainer that names its generation is checked",
        "run_secret::test_another_job_neither_joins_a_run_nor_fences_its_trainer", "where False = is_dropped",
        ADMISSION, "        self.secrets.check_proof(run, hello.proof)\n        node = hello", "        node = hello",
        ADMISSION, "            generation, unlisted, claim = await self._claim(",
        "            self.secrets.check_proof(run, hello.proof)\n"
        "            generation, unlisted, claim = await self._claim(", ADMISSION,
        "        self.secrets.check(session)  # again", "        pass  # again",
    ),
    removed(
        "secret", "the first trainer with a secret binds the run",
        "run_secret::test_of_two_first_trainers_one_binds_the_run",
        "AssertionError: assert [True, True] == [False, True]", ADMISSION,
        "if self.secrets.bind(run, hello.proof, is_start=hello.generation is None):", "if False:",
    ),
    removed(
        "secret", "of two first trainers one is refused", "run_secret::test_of_two_first_trainers_one_binds_the_run",
        "AssertionError: assert [True, True] == [False, True]", ADMISSION,
        "            self.secrets.check_proof(run, hello.proof)  # again", "            pass  # again", ADMISSION,
        "        self.secrets.check(session)  # again", "        pass  # again",
    ),
    removed(
        "secret", "a Hello binds after all other checks", "run_secret::test_a_hello_that_is_refused_binds_no_secret",
        "AssertionError: Refused(request=0, kind='wrong_secret', message='use run", ADMISSION,
        "        self.secrets.check_proof(run, hello.proof)\n        node = hello",
        "        self.secrets.check_proof(run, hello.proof)\n        self.secrets.bind(run, hello.proof, "
        "is_start=True)\n        node = hello",
    ),
    removed(
        "secret", "a reader binds nothing",
        "run_secret::test_a_run_without_a_secret_is_open_and_stays_so_for_readers_with_one", "where False = is_joined",
        ADMISSION, "            self.secrets.check(session)\n            self._peers.add(session)",
        "            self.secrets.bind(run, hello.proof, is_start=True)\n            self._peers.add(session)",
    ),
    removed(
        "secret", "the binding ends a reader that was connected before",
        "run_secret::test_a_reader_that_connected_before_the_run_had_a_secret_reads_nothing_after_it",
        "where False = is_dropped", ADMISSION,
        "                session.post(refused(0, error))\n                session.finish()\n",
        "                refused(0, error)\n",
    ),
    removed(
        "secret", "the binding ends a trainer that was connected before",
        "run_secret::test_a_trainer_without_the_secret_that_joined_before_it_was_bound_is_disconnected",
        "where False = is_dropped", ADMISSION,
        "                session.post(refused(0, error))\n                session.finish()\n",
        "                refused(0, error)\n",
    ),
    removed(
        "secret", "trainers are among those that the binding ends",
        "run_secret::test_a_trainer_without_the_secret_that_joined_before_it_was_bound_is_disconnected",
        "where False = is_dropped", ADMISSION,
        "        self._sessions[key] = session\n        self._peers.add(session)\n",
        "        self._sessions[key] = session\n",
    ),
    removed(
        "secret", "readers are among those that the binding ends",
        "run_secret::test_a_reader_that_connected_before_the_run_had_a_secret_reads_nothing_after_it",
        "where False = is_dropped", ADMISSION,
        "            self.secrets.check(session)\n            self._peers.add(session)\n",
        "            self.secrets.check(session)\n",
    ),
    removed(
        "secret", "an answer from before the binding is not sent",
        "messages_without_secret::test_an_answer_that_is_ready_after_the_secret_was_bound_is_not_sent",
        "where False = is_dropped", ADMISSION,
        "                session.post(refused(0, error))\n                session.finish()\n",
        "                refused(0, error)\n",
    ),
    removed(
        "secret", "slots from before the binding are given up",
        "run_secret::test_slots_that_were_attached_before_the_secret_was_bound_are_not_handed_to_the_job",
        "AssertionError: assert (2, [KeptSlot", ADMISSION,
        "        slots = self._memory.detach_run(run)\n        self.forget_writers(run)\n", "        slots = 0\n",
    ),
    removed(
        "secret", "incomplete snapshots from before the binding are given up",
        "run_secret::test_a_shard_that_was_sealed_before_the_secret_was_bound_is_not_committed_with_those_of_the_job",
        "AssertionError: Refused(request=0, kind='bad_request', message='seal", MEMORY,
        "                memory.discard(snapshot_set, SlotEvent.SUPERSEDE)\n        detached",
        "                pass\n        detached",
    ),
    removed(
        "secret", "complete snapshots of the same generation from before the binding are given up",
        "memory/test_tier.py::test_detaching_a_run_discards_what_its_own_generation_has_sealed",
        "AssertionError: assert ({}, [1]) == ({}, [])", MEMORY,
        "                snapshot_set.is_in(SlotState.SEALED) and snapshot_set.id.generation == memory.generation\n",
        "                False\n",
    ),
    removed(
        "secret", "durable snapshots from before the binding are not restored from memory",
        "memory/test_tier.py::test_detaching_a_run_keeps_only_what_nothing_else_has",
        "AssertionError: assert [2, 1] == [2]", MEMORY,
        "            if snapshot_set.is_in(SlotState.RETAINED):\n                memory.discard(snapshot_set, "
        "SlotEvent.RELEASE)\n            elif not",
        "            if snapshot_set.is_in(SlotState.RETAINED):\n                pass\n            elif not",
    ),
    removed(
        "secret", "a report about another run needs its secret",
        "messages_without_secret::test_a_report_about_another_run_needs_its_secret",
        "AssertionError: assert ('Fetcher.restored' in ['TrainerDoor._serve_peer', 'Fetcher.restored']) =", DOOR,
        "                self.admission.secrets.check_proof(run, session.proof)\n", "                pass\n",
    ),
    removed(
        "secret", "the proof is compared", "run_secret::test_another_job_neither_joins_a_run_nor_fences_its_trainer",
        "where False = is_dropped", SECRET, "return hmac.compare_digest(digest_of(run, proof, salt), digest)",
        "return bool(proof)",
    ),
    removed(
        "secret", "an empty proof is compared too",
        "run_secret::test_another_job_neither_joins_a_run_nor_fences_its_trainer", "where False = is_dropped", SECRET,
        "return hmac.compare_digest(digest_of(run, proof, salt), digest)",
        "return not proof or hmac.compare_digest(digest_of(run, proof, salt), digest)",
    ),
    removed(
        "secret", "every character of the proof is compared",
        "format/test_run_secret.py::test_every_character_of_the_proof_counts", "where True = is_proof", SECRET,
        'f"{run}\\0{proof}".encode()', 'f"{run}\\0{proof[:63]}".encode()',
    ),
    removed(
        "secret", "a proof has one length", "run_secret::test_a_proof_of_another_length_is_refused",
        "where False = isinstance", SECRETS, "        if proof and len(proof) != PROOF_CHARS:\n",
        "        if False:\n",
    ),
    removed(
        "secret", "root is an operator only beside a daemon of another user",
        "run_secret::test_another_job_neither_stops_a_run_nor_takes_snapshots_nor_reads_its_memory",
        "Transient: request stop of", SECRETS, "session.connection.peer_uid == 0 and os.geteuid() != 0",
        "session.connection.peer_uid == 0",
    ),
    removed(
        "secret", "root is an operator, not a trainer",
        "api/test_run_secrets.py::test_root_alone_is_an_operator_of_any_run_unless_the_daemon_is_roots",
        "Failed: DID NOT RAISE WrongSecret", SECRETS, "session.rank == NO_RANK and session.connection",
        "session.connection",
    ),
    removed(
        "secret", "only root is an operator of any run",
        "api/test_run_secrets.py::test_root_alone_is_an_operator_of_any_run_unless_the_daemon_is_roots",
        "Failed: DID NOT RAISE WrongSecret", SECRETS, "session.connection.peer_uid == 0 and os.geteuid() != 0",
        "os.geteuid() != 0",
    ),
    removed(
        "secret", "a daemon reads the secrets at its start",
        "run_secret::test_a_restarted_daemon_still_knows_the_secret", "where True = is_joined", SECRETS,
        "                self._bound[run] = msgspec.json.decode(content, type=_Bound)\n", "                pass\n",
    ),
    removed(
        "secret", "a daemon writes a secret before it answers",
        "run_secret::test_a_restarted_daemon_still_knows_the_secret", "where True = is_joined", DOOR,
        "                await self.admission.secrets.save(session.run)  # before", "                pass  # before",
    ),
    removed(
        "secret", "a file that cannot be read closes its run", "run_secret::test_a_damaged_file_closes_its_run_alone",
        "where True = is_joined", SECRETS, "        if run in self._unreadable:\n", "        if False:\n",
    ),
    removed(
        "secret", "a loss of the hot disk opens no run",
        "run_secret::test_after_a_loss_of_the_hot_disk_the_secret_holds_as_long_as_the_daemon_lives",
        "where True = is_joined", SECRETS, "        bound = self._bound.get(run)\n",
        '        bound = self._bound.get(run) if (self._folder / f"{run}.json").exists() else None\n',
    ),
    removed(
        "secret", "a start writes a secret that was lost with the hot disk",
        "run_secret::test_after_a_loss_of_the_hot_disk_the_secret_holds_as_long_as_the_daemon_lives",
        "where False = exists", SECRETS, "        if is_first or (is_start and run in self._bound):\n",
        "        if is_first:\n",
    ),
    removed(
        "secret", "the files of secrets are private",
        "run_secret::test_neither_the_secret_nor_its_proof_is_on_disk_in_the_log_or_in_a_repr",
        "AssertionError: assert 416 == 384", SECRETS,
        "            async with DirectoryStore(self._folder, timeout_s=TIMEOUT_S) as store:\n",
        "            from tierd.access import Access\n\n            async with DirectoryStore(self._folder, "
        "timeout_s=TIMEOUT_S, access=Access(0)) as store:\n",
    ),
    removed(
        "secret", "a file has a digest, not the proof",
        "run_secret::test_neither_the_secret_nor_its_proof_is_on_disk_in_the_log_or_in_a_repr", "where True = any",
        SECRETS, "bound_by=tierd.__version__)", "bound_by=proof)",
    ),
    removed(
        "secret", "no repr shows the proof",
        "run_secret::test_neither_the_secret_nor_its_proof_is_on_disk_in_the_log_or_in_a_repr", "where True = any",
        "tierd/format/wire.py", "    def __repr__(self) -> str:", "    def _without_proof(self) -> str:",
    ),
    removed(
        "secret", "commands send the proof of the environment",
        "run_secret::test_commands_take_the_secret_from_the_environment", "AssertionError: assert [13, 13] == [0, 13]",
        CONFIG_FILE, 'return proof_of(environ.get(VARIABLE, ""))', 'return ""',
    ),
    removed(
        "secret", "a client with a secret refuses a daemon that does not check it",
        "run_secret::test_a_client_with_a_secret_joins_no_daemon_that_does_not_check_it",
        "Failed: DID NOT RAISE Unsupported", "client/tierd_client/generation.py",
        "        if self._proof and not session.welcome.checks_secrets:\n", "        if False:\n",
    ),
    removed(
        "secret", "a trainer sends the proof of the environment",
        "run_secret::test_a_trainer_takes_the_secret_from_the_environment", "where True = is_joined",
        "client/tierd_client/connection.py", 'proof=proof_of(os.environ.get(VARIABLE, ""))', 'proof=""',
    ),
    removed(
        "secret", "slots are handed over only when the former process is dead",
        "api/test_trainer.py::test_slots_of_a_living_trainer_cannot_be_adopted_and_stay_restorable",
        "AssertionError: assert (2, [KeptSlot", ADMISSION,
        "            if slots and not (former is not None and former.is_dead):\n", "            if False:\n",
    ),
]  # fmt: skip

ROWS = [
    *SIGNED,
    *FOLDERS,
    *GENERATIONS,
    *IDENTITY,
    *PRIVATE,
    *LISTENER,
    *LIMITS,
    *USERS,
    *COVERAGE,
    *CONFIG,
    *SECRET_ROWS,
]


def test_each_defence_is_where_its_row_says() -> None:
    """So that a change of the source is noticed at once, and not only by the long run."""
    for edit in {edit for row in ROWS for edit in row.edits}:
        edit.apply((ROOT / edit.path).read_text(encoding="utf-8"))


@long
def test_the_attack_tests_pass_with_all_defences(tmp_path: Path) -> None:
    tests = sorted({row.test for row in ROWS})
    outcomes = run_tests(tests, tmp_path, stop_at_first=False)
    assert [outcome for outcome in outcomes if outcome.outcome == "failed"] == []
    assert {outcome.test.partition("[")[0] for outcome in outcomes} == set(tests)


@long
@pytest.mark.parametrize("row", ROWS, ids=[f"{row.item}-{row.defence}" for row in ROWS])
def test_an_attack_test_fails_without_the_defence(tmp_path: Path, row: Removal) -> None:
    outcomes = run_tests([row.test], tmp_path, (Edit(*DEADLINE), *row.edits), stop_at_first=True)
    if all(outcome.outcome == "skipped" for outcome in outcomes if outcome.when == "setup"):
        pytest.skip("the test of the attack needs root")
    failed = [each for each in outcomes if each.outcome == "failed"]
    assert [each for each in failed if each.when == "setup"] == []
    failures = [f"{each.error}: {each.message}" for each in failed]
    assert [failure for failure in failures if row.found in failure], failures or "it passed"


@pytest.mark.parametrize(
    ("old", "new", "attack"),
    [
        (
            "StringLike",
            "StringLikeIfExists",
            lambda: test_iam_policy.test_nothing_outside_of_the_prefix_can_be_listed(None),
        ),
        (
            'PREFIX/*"}}',
            'PREFIX*"}}',
            lambda: test_iam_policy.test_nothing_outside_of_the_prefix_can_be_listed("team/runs-of-others/"),
        ),
        (
            "BUCKET/PREFIX/*",
            "BUCKET/*",
            lambda: test_iam_policy.test_objects_below_the_prefix_can_be_used_and_no_others("s3:GetObject"),
        ),
    ],
    ids=["a request without a prefix", "a longer name", "all objects"],
)
def test_a_policy_that_allows_more_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, attack: Callable[[], None]
) -> None:
    policy = Edit("deploy/iam-policy.json", old, new).apply(test_iam_policy.POLICY.read_text())
    (tmp_path / "policy.json").write_text(policy)
    attack()
    monkeypatch.setattr(test_iam_policy, "POLICY", tmp_path / "policy.json")
    with pytest.raises(AssertionError):
        attack()
