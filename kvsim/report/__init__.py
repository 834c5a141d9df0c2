"""One page about runs: from the folders that `kvsim run --out` wrote to HTML that needs nothing else."""
