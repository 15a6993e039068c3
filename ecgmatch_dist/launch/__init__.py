"""Many runs at once: sweeps, their Slurm jobs, their status. The trainer does not import this."""
