#!/bin/bash
# Slurm's Prolog: starts a daemon for the job on this node, as the job's user and outside the job. Slurm then never ends it
# with the job, and slurm-epilog.sh lets it bring the last checkpoints to the cold tier after the job.
#
# For nodes that a job has to itself. In slurm.conf:
#   Prolog=/etc/slurm/slurm-prolog.sh
#   Epilog=/etc/slurm/slurm-epilog.sh
# The job script starts no daemon. It says where this one is:
#   export TIERD_SOCKET=/run/tierd-$SLURM_JOB_ID/tierd.sock
# A user's checkpoints are in a folder of their own on the local disk, so a job that comes back to this node finds them.
hot=${LOCAL_DISK:-/var/lib/tierd}/$SLURM_JOB_USER
name=tierd-$SLURM_JOB_ID

install -d -m 0700 -o "$SLURM_JOB_USER" "$hot"
# Type=notify: systemd-run returns when the daemon is ready. TimeoutStopSec: longer than both times of the drain.
if ! systemd-run --quiet --collect --unit="$name" --uid="$SLURM_JOB_USER" \
  --property=Type=notify --property=NotifyAccess=main --property=KillMode=mixed --property=TimeoutStopSec=800 \
  --property=OOMScoreAdjust=-500 --property=RuntimeDirectory="$name" --property=RuntimeDirectoryMode=0700 \
  --setenv=TIERD_CONFIG="${TIERD_CONFIG:-/etc/tierd/tierd.toml}" --setenv=TIERD_HOT_PATH="$hot" \
  --setenv=TIERD_DAEMON_SOCKET="/run/$name/tierd.sock" --setenv=TIERD_DAEMON_DRAIN_COLD_S=600 \
  /usr/local/bin/tierd serve; then
  # Another exit code than 0 would drain the node. Here the training says that there is no daemon.
  logger --tag "$name" "the daemon does not start: journalctl --unit $name"
fi
exit 0
