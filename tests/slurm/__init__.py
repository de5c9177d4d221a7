"""The job scripts of ``deploy/slurm`` on a real Slurm: this machine as several nodes, simulated engines."""
