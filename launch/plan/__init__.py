"""What a run will need before it is started: memory, time and bandwidth, by arithmetic alone."""
