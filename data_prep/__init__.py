"""Text in, megatron-core's indexed binaries out: nothing lost, nothing twice, restartable."""
