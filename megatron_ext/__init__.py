"""What this project adds to megatron-core: replicas, Muon, the outer loop, checkpoints."""
