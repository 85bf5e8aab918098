import signal
import sys

from data_prep.cli import main


def _interrupt(*_: object) -> None:
    """End on SIGTERM, which batch systems send, as on Ctrl-C: workers first, then one line."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
