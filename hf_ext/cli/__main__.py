"""The `hf-ext` command; `python -m hf_ext.cli` runs it too."""

import signal
import sys


def main() -> int:
    """Runs the command line of the process and returns the exit code. SIGTERM and SIGHUP interrupt a command as Ctrl-C does, so
    that it removes its temporary files. Then they end the process."""
    received: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, interrupt)
    try:
        from hf_ext.cli.main import main as run  # inside, as Ctrl-C may come while it is imported

        return run()
    except KeyboardInterrupt:
        print("hf-ext: interrupted.", file=sys.stderr)
        return 130
    finally:
        if received:
            signal.signal(received[0], signal.SIG_DFL)
            signal.raise_signal(received[0])


if __name__ == "__main__":
    sys.exit(main())
