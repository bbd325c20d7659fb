"""The race sanitizer: rebuilds the order of KV accesses from what lanes and pools report, and believes
nothing else."""
