#!/bin/bash
# Slurm's Epilog: ends the daemon that slurm-prolog.sh has started. Sealed snapshots become durable, then what waits for the
# cold tier is copied (daemon.drain_cold_s). The node takes no other job meanwhile. PrologEpilogTimeout of slurm.conf, if it
# is set, must be longer than that.
systemctl stop "tierd-$SLURM_JOB_ID" 2>/dev/null || true
exit 0
