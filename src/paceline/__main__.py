"""The command. Until it begins to work, Ctrl-C ends it without a word: there is nothing to save yet."""

import signal


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from paceline.cli import main

    main.main()


if __name__ == "__main__":
    main()
