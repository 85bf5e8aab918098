"""What a machine has, what is missing, what that costs, and how fast it is."""
