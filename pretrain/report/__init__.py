"""One self-contained page about one or several runs."""
