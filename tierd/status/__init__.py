"""What people and programs are shown: status, checkpoints, the plan of the lifecycle, incidents and alarms."""
