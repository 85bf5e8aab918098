"""Starting training: on this machine, and on clusters."""
