"""The command `paceline`. Ctrl-C ends it silently until the verb starts to work: there is nothing to save yet."""

import signal


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from paceline.cli.main import main as run_verb

    run_verb()


if __name__ == "__main__":
    main()
