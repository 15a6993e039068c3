"""Many runs at once: sweeps, the jobs that Slurm runs, and what became of them. The trainer knows nothing of this."""
