"""The `hf-ext` command; `python -m hf_ext.cli` runs it too."""

import sys


def main() -> int:
    """Runs the command line of the process and returns the exit code."""
    try:
        from hf_ext.cli.main import main as run  # inside, as Ctrl-C may come while it is imported

        return run()
    except KeyboardInterrupt:
        print("hf-ext: interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
