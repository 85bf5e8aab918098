"""How a command ends."""

import pytest

from pretrain import exit


def test_ctrl_c_while_a_command_is_being_imported_is_no_traceback(capfd):
    def main(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        exit.end_with(main)
    assert end.value.code == 130
    assert capfd.readouterr().err == ""
